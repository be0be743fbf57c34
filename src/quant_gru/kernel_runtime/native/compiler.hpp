// Compiles the embedded CUDA sources with NVRTC, which is opened at run time.
#pragma once

#include <string>

#include "kernel_runtime/native/launch.hpp"

namespace kernel_runtime::cuda {

// The machine code of a kernel for an architecture such as "sm_90a", from the cache on disk if it
// is there. Several threads may compile at once. Fails: NVRTC is missing, or it rejects the source.
// NVRTC is libnvrtc.so.13 or libnvrtc.so.12, or the library that the environment names.
std::string machine_code(const Kernel &kernel, const std::string &arch);

// The key of that code in the cache on disk. The Python package has the same keys.
std::string key_of(const Kernel &kernel, const std::string &arch);

}  // namespace kernel_runtime::cuda
