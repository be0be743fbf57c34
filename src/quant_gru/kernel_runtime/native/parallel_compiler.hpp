// Compiles kernels in threads before they are loaded; NVRTC's compilations run concurrently.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "kernel_runtime/native/launch.hpp"

namespace kernel_runtime::cuda {

// What the machine code of a kernel depends on. Functions of a source share it.
std::string name_of(const Kernel &kernel);

// Starts a thread that calls `work`, if it can. The process must wait for the thread at its exit,
// because NVRTC does not survive the unloading of libraries.
using StartThread = std::function<void(std::function<void()> work)>;

// Several threads may use it at once. It must not be destroyed while `take` runs.
class ParallelCompiler {
 public:
    // Returns machine code, or throws.
    using Compile = std::function<std::string(const Kernel &)>;

    // start: null if only `work` compiles.
    ParallelCompiler(Compile compile, StartThread start);

    // Starts compiling a kernel in a thread, unless it has been started; `take` throws the errors.
    // Returns whether it is new.
    bool expect(const Kernel &kernel);

    // Compiles what is expected and not begun, unless a thread of each processor does so already.
    void work();

    // Waits while a thread compiles the kernel, but not longer than that. Returns whether `take`
    // would not wait for a thread.
    bool wait(const Kernel &kernel, std::chrono::milliseconds most);

    // Returns the machine code of a kernel. Compiles it if no thread has begun. If it throws, the
    // next call tries again. Only one thread at a time may take a kernel.
    std::string take(const Kernel &kernel);

 private:
    struct State;
    std::shared_ptr<State> state_;  // threads have it, too
    StartThread start_;
};

}  // namespace kernel_runtime::cuda
