// The texts of CUDA sources, embedded when the library is built (cmake/embed_sources.cmake), and
// what compiles them. Device::at gives the GPUs with these kernels.
#pragma once

#include <cstddef>
#include <string>

#include "kernel_runtime/native/compiler.hpp"

namespace kernel_runtime::cuda {

struct Source {
    const char *name;  // of a kernel: "recurrence/persistent.cu"; of a header: as in its #include
    const char *text;
};

// Sorted by name, headers and kernels together.
extern const Source kSources[];
extern const size_t kSourceCount;

// Compiles the embedded sources with libnvrtc.so.13 or libnvrtc.so.12, or the library that the
// environment names. Fails: there is none.
const Compiler &embedded_compiler();

// The same for one kernel, from the cache on disk if it is there.
std::string machine_code(const Kernel &kernel, const std::string &arch);

// libcuda.so.1, or the library that the environment names.
std::string driver_name();

}  // namespace kernel_runtime::cuda
