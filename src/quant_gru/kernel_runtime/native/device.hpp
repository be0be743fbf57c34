// A GPU: its kernels, launches and memory. driver.hpp, parallel_compiler.hpp and
// recorded_graphs.hpp are below it. A function that fails throws the exception of embedder.hpp.
//
//     Device &device = Device::at(0);
//     const Function function = device.load({"folder/file", "function", {}});
//     Memory memory(device, bytes);
//     Arguments arguments{...};  // the struct that the kernel takes
//     device.launch(function, {blocks, 1, 256}, &arguments, stream);
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "kernel_runtime/native/driver.hpp"
#include "kernel_runtime/native/parallel_compiler.hpp"
#include "kernel_runtime/native/recorded_graphs.hpp"

namespace kernel_runtime::cuda {

// A loaded kernel.
struct Function {
    void *handle = nullptr;
};

// All functions may run in several threads at once. They restore the calling thread's context.
class Device {
 public:
    // Returns the machine code of a kernel for an architecture, or throws.
    using Compile = std::function<std::string(const Kernel &kernel, const std::string &arch)>;

    // The GPU of an index, as CUDA counts them; its context is the primary one, as in the CUDA
    // runtime and in PyTorch, and is never released. The driver must outlive it. start: as of
    // ParallelCompiler. graphs: whether lists of launches that repeat become graphs. Fails: no such
    // GPU, or a compute capability below 8.0.
    Device(const Driver &driver, int index, Compile compile, StartThread start, bool graphs);

    // The GPU with the embedded kernels, opened at the first use and never closed. Fails: no
    // driver, too.
    static Device &at(int index);

    int index() const { return index_; }
    int capability() const { return capability_; }  // 90 for 9.0
    int multiprocessors() const { return multiprocessors_; }
    const std::string &arch() const { return arch_; }  // such as "sm_90a"
    // GPUs of other major versions have no clusters, or too little memory for our kernels.
    bool has_clusters() const { return capability_ / 10 == 9 || capability_ / 10 == 10; }
    const Driver &driver() const { return driver_; }
    void *context() const { return context_; }
    GraphDriver &graphs() { return graphs_; }

    // Blocks per cluster -> number of such clusters that run at once. {1: multiprocessors()} and,
    // if the GPU has clusters, 2, 4, 8 and 16 blocks.
    const std::map<int, int> &clusters();

    // As of ParallelCompiler.
    void expect(const Kernel &kernel) { compiler_->expect(kernel); }
    bool wait(const Kernel &kernel, std::chrono::milliseconds most) {
        return compiler_->wait(kernel, most);
    }

    // Compiles kernels in parallel, so that `load` finds them; it throws the errors.
    void compile(const std::vector<Kernel> &kernels);

    // Compiles and loads a kernel at its first use. `grid` has the largest shared memory and the
    // cluster size of its launches. Must not be called while a graph is captured.
    Function load(const Kernel &kernel, const Grid &grid = {});

    // Starts a kernel that takes one struct, which is copied.
    void launch(const Function &function, const Grid &grid, const void *argument, Stream stream);

    // The same for several parameters, given by their addresses.
    void launch(const Function &function, const Grid &grid, void **parameters, Stream stream);

    // The same for one struct, in the current context, which must be that of this device. Returns
    // the driver's status. The driver copies configuration and arguments before it returns.
    int launch(const LaunchConfig &config, uintptr_t function, uintptr_t argument) const {
        void *parameters[] = {reinterpret_cast<void *>(argument)};
        return driver_.cuLaunchKernelEx(&config, reinterpret_cast<void *>(function), parameters,
                                        nullptr);
    }

    // Calls `action`, which returns a status, with the context current, then restores the previous
    // context. Returns the first status that is not 0.
    template <class Action>
    int in_context(const Action &action) const {
        void *before = nullptr;
        if (const int status = driver_.cuCtxGetCurrent(&before)) return status;
        if (before == context_) return action();
        if (const int status = driver_.cuCtxSetCurrent(context_)) return status;
        const int status = action(), back = driver_.cuCtxSetCurrent(before);
        return status ? status : back;
    }

 private:
    std::map<int, int> counted_clusters();

    const Driver &driver_;
    int index_, capability_ = 0, multiprocessors_ = 0;
    std::string arch_;
    void *context_ = nullptr;
    std::optional<ParallelCompiler> compiler_;
    GraphDriver graphs_;
    std::mutex loading_;                     // guards the two below
    std::map<std::string, void *> modules_;  // by name_of
    std::map<void *, unsigned> shared_;      // by function
    std::mutex counting_;
    std::map<int, int> clusters_;
};

// Makes the context of a device current, then restores the previous one, which other libraries use.
class CurrentContext {
 public:
    explicit CurrentContext(const Device &device) : driver_(device.driver()) {
        driver_.check(driver_.cuCtxGetCurrent(&before_));
        changed_ = before_ != device.context();
        if (changed_) driver_.check(driver_.cuCtxSetCurrent(device.context()));
    }
    CurrentContext(const CurrentContext &) = delete;
    CurrentContext &operator=(const CurrentContext &) = delete;
    ~CurrentContext() {
        if (changed_) driver_.cuCtxSetCurrent(before_);
    }

 private:
    const Driver &driver_;
    void *before_ = nullptr;
    bool changed_ = false;
};

// Memory of a GPU.
class Memory {
 public:
    Memory() = default;
    Memory(Device &device, size_t bytes);
    Memory(Memory &&other) noexcept { *this = std::move(other); }
    Memory &operator=(Memory &&other) noexcept;
    ~Memory();

    Address address() const { return address_; }
    size_t size() const { return size_; }

    // Copies from or to host memory, and waits for the end of the copy.
    void upload(const void *from, size_t bytes, size_t offset = 0);
    void download(void *to, size_t bytes, size_t offset = 0) const;

 private:
    Device *device_ = nullptr;
    Address address_ = 0;
    size_t size_ = 0;
};

}  // namespace kernel_runtime::cuda
