// Prepared launches, and addresses in their arguments: what a call repeats, without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace kernel_runtime {

// Fields of arguments that point into one piece of memory.
class Fields {
 public:
    // A field of 8 bytes, which lives longer than this.
    void add(uintptr_t field, int64_t offset) {
        fields_.emplace_back(reinterpret_cast<uint64_t *>(field), offset);
    }
    // Let all of them follow the memory to an address; null where that is 0.
    void move(uintptr_t base);

 private:
    uintptr_t base_ = 0;
    std::vector<std::pair<uint64_t *, int64_t>> fields_;
};

// The driver, by the addresses of its functions: no header of CUDA's is needed for its C interface.
class Driver {
 public:
    // cuLaunchKernelEx, cuCtxGetCurrent and cuCtxSetCurrent, and the context to launch in.
    Driver(uintptr_t launch, uintptr_t get_current, uintptr_t set_current, uintptr_t context)
        : launch_(reinterpret_cast<Launch>(launch)),
          get_current_(reinterpret_cast<GetCurrent>(get_current)),
          set_current_(reinterpret_cast<SetCurrent>(set_current)),
          context_(reinterpret_cast<void *>(context)) {}
    // Returns the driver's status, 0 if all is well. The context has to be current.
    int launch(uintptr_t config, uintptr_t function, uintptr_t parameters) const;
    // Calls `action` while the context is current, and lets what was before be so again, by which
    // others tell the device; returns the status of what went wrong first.
    template <class Action>
    int in_context(const Action &action) const {
        void *before = nullptr;
        if (const int status = get_current_(&before)) return status;
        if (before == context_) return action();
        if (const int status = set_current_(context_)) return status;
        const int status = action(), back = set_current_(before);
        return status ? status : back;
    }

 private:
    using Launch = int (*)(void *config, void *function, void **parameters, void **extra);
    using GetCurrent = int (*)(void **context);
    using SetCurrent = int (*)(void *context);
    Launch launch_;
    GetCurrent get_current_;
    SetCurrent set_current_;
    void *context_;
};

// The arguments of cublasLtMatmul, in its order; no header of it is needed, either.
struct Product {
    void *handle, *operation;
    const void *alpha, *a;
    void *a_layout;
    const void *b;
    void *b_layout;
    const void *beta, *c;
    void *c_layout, *d, *d_layout;
    const void *algorithm;
    void *workspace;
    size_t workspace_size;
    void *stream;
};

// Launches that are started one after the other, by one thread at a time.
class Launches {
 public:
    explicit Launches(const Driver &driver) : driver_(driver) {}
    // Addresses of a configuration, of its field for the stream, of a function, and of the pointers
    // to its parameters. Without a configuration the function is cublasLtMatmul, and the last
    // address that of a Product.
    void add(uintptr_t config, uintptr_t stream, uintptr_t function, uintptr_t parameters) {
        all_.push_back({config, reinterpret_cast<uintptr_t *>(stream), function, parameters});
    }
    // Returns 0, or the status of the first that failed, after which none is started; that of a
    // product is negative.
    int start(uintptr_t stream);
    // Fields, which live longer than this, whose memory `start_at` is told.
    void follow(Fields *fields) { fields_.push_back(fields); }
    // `start` after all fields, in the order of `follow`, have moved.
    int start_at(uintptr_t stream, const std::vector<uintptr_t> &bases);

 private:
    struct One {
        uintptr_t config;
        uintptr_t *stream;
        uintptr_t function, parameters;
    };
    int start_locked(uintptr_t stream) const;
    const Driver &driver_;
    std::vector<One> all_;
    std::vector<Fields *> fields_;
    std::mutex mutex_;
};

}  // namespace kernel_runtime
