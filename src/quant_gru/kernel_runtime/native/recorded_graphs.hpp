// Launches that repeat with equal arguments, recorded as CUDA graphs: a graph takes the host little
// more than one launch.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernel_runtime/native/driver.hpp"

namespace kernel_runtime {

// Records and starts graphs through the CUDA driver, in the current context.
class GraphDriver {
 public:
    GraphDriver(const cuda::Driver &driver, bool wanted)
        : driver_(driver), available_(wanted && driver.has_graphs) {}

    bool available() const { return available_; }
    // Whether there are so many graphs that no more should be recorded.
    bool full() const { return graphs_ >= kMostGraphs; }
    // Whether the caller records the stream in a graph, or that cannot be known.
    bool is_capturing(cuda::Stream stream) const;
    // Returns a graph of what `start(stream)` launches on the stream that it gets, on the GPU
    // before further work of `user`; null if that or the driver fails.
    template <class Start>
    void *record(cuda::Stream user, const Start &start) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const Relaxed relaxed(driver_);
        return relaxed.holds() && begin() ? end(start(stream_) == 0, user) : nullptr;
    }
    // Returns the driver's status.
    int start(void *graph, cuda::Stream stream) const;
    // Frees a graph, after it has ended if it runs. Any context, or none, may be current.
    void forget(void *graph);

 private:
    // While it exists, no recording, also of another thread, forbids a call in this thread.
    class Relaxed {
     public:
        explicit Relaxed(const cuda::Driver &driver);
        Relaxed(const Relaxed &) = delete;
        Relaxed &operator=(const Relaxed &) = delete;
        ~Relaxed();
        bool holds() const { return holds_; }

     private:
        const cuda::Driver &driver_;
        int mode_;
        bool holds_;
    };
    bool begin();
    void *end(bool launched, cuda::Stream user);

    static constexpr int kMostGraphs = 256;
    const cuda::Driver &driver_;
    const bool available_;
    std::mutex mutex_;
    cuda::Stream stream_ = nullptr;
    std::atomic<int> graphs_{0};
};

// Graphs of one list of launches, each for one set of arguments. Used by one thread at a time.
class RecordedGraphs {
 public:
    // All that the arguments of the launches depend on, such as addresses of tensors.
    using Key = std::vector<uintptr_t>;

    RecordedGraphs() = default;
    RecordedGraphs(const RecordedGraphs &) = delete;
    RecordedGraphs &operator=(const RecordedGraphs &) = delete;
    ~RecordedGraphs();

    // Returns the graph for a start with this key; null if launches must be started one by one.
    // `start(stream)` does that, and is recorded if the key repeats.
    template <class Start>
    void *take(GraphDriver &driver, const Key &key, cuda::Stream stream, const Start &start) {
        if (driver.is_capturing(stream)) return nullptr;
        driver_ = &driver;
        Entry &entry = entry_of(key);
        if (!entry.graph && entry.starts >= kFirst && credit_ >= kCost && !driver.full()) {
            entry.graph = driver.record(stream, start);
            credit_ = entry.graph ? credit_ - kCost : kNever;
        }
        return entry.graph;
    }

 private:
    // Recording takes the host as long as some starts. Calls whose addresses rarely repeat must not
    // pay for it each time. The first starts load kernels and libraries, which cannot be recorded.
    // What the driver cannot record is not tried again.
    static constexpr int kEntries = 4, kFirst = 3, kCost = 16, kMostCredit = 64, kNever = -1;
    struct Entry {
        Key key;
        int starts = 0;
        uint64_t latest = 0;
        void *graph = nullptr;
    };

    // Counts a start of the key. A new key replaces the one that has not been used for longest.
    Entry &entry_of(const Key &key);

    std::array<Entry, kEntries> entries_;
    uint64_t clock_ = 0;
    int credit_ = kMostCredit;
    GraphDriver *driver_ = nullptr;
};

}  // namespace kernel_runtime
