// The texts of CUDA sources, embedded when the library is built (cmake/embed_sources.cmake).
#pragma once

#include <cstddef>

namespace kernel_runtime::cuda {

struct Source {
    const char *name;  // of a kernel: "recurrence/persistent.cu"; of a header: as in its #include
    const char *text;
};

// Sorted by name, headers and kernels together.
extern const Source kSources[];
extern const size_t kSourceCount;

}  // namespace kernel_runtime::cuda
