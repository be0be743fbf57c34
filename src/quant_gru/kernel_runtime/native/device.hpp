// A GPU: its kernels, launches and memory. driver.hpp and compiler.hpp are below it. A function
// that fails throws the exception of embedder.hpp.
//
//     Device &device = Device::at(0);
//     const Function function = device.load({"folder/file", "function", {}});
//     Memory memory(device, bytes);
//     Arguments arguments{...};  // the struct that the kernel takes
//     device.launch(function, {blocks, 1, 256}, &arguments, stream);
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernel_runtime/native/compiler.hpp"
#include "kernel_runtime/native/driver.hpp"

namespace kernel_runtime::cuda {

// Compiles the embedded sources with libnvrtc.so.13 or libnvrtc.so.12, or the library that the
// environment names. Fails: there is none.
const Compiler &embedded_compiler();

// The same for one kernel, from the cache on disk if it is there.
std::string machine_code(const Kernel &kernel, const std::string &arch);

// A loaded kernel.
struct Function {
    void *handle = nullptr;
};

// All functions may run in several threads at once. They restore the calling thread's context.
class Device {
 public:
    // The GPU of an index, as CUDA counts them. It is opened at the first use and never closed;
    // its context is the primary one, as in the CUDA runtime and in PyTorch. Fails: no driver, no
    // such GPU, or a compute capability below 8.0.
    static Device &at(int index);

    int index() const { return index_; }
    int capability() const { return capability_; }  // 90 for 9.0
    int multiprocessors() const { return multiprocessors_; }
    const std::string &arch() const { return arch_; }  // such as "sm_90a"
    bool has_clusters() const { return capability_ / 10 == 9 || capability_ / 10 == 10; }

    // Blocks per cluster -> number of such clusters that run at once. {1: multiprocessors()} and,
    // if the GPU has clusters, 2, 4, 8 and 16 blocks.
    const std::map<int, int> &clusters();

    // Compiles kernels in parallel, so that `load` finds them.
    void compile(const std::vector<Kernel> &kernels);

    // Compiles and loads a kernel at its first use. `grid` has the largest shared memory and the
    // cluster size of its launches. Must not be called while a graph is captured.
    Function load(const Kernel &kernel, const Grid &grid = {});

    // Starts a kernel that takes one struct, which is copied.
    void launch(const Function &function, const Grid &grid, const void *argument, Stream stream);

    // The same for several parameters, given by their addresses.
    void launch(const Function &function, const Grid &grid, void **parameters, Stream stream);

 private:
    friend class Memory;
    explicit Device(int index);
    std::string code_of(const Kernel &kernel);
    std::map<int, int> counted_clusters();

    int index_, capability_ = 0, multiprocessors_ = 0;
    std::string arch_;
    void *context_ = nullptr;
    std::mutex mutex_;                             // guards everything below
    std::map<std::string, std::string> compiled_;  // by name, until loaded
    std::map<std::string, void *> modules_;        // by name
    std::map<void *, unsigned> shared_;            // by function
    std::once_flag counted_;
    std::map<int, int> clusters_;
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
