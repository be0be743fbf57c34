// What the library that contains the runtime decides. It defines `fail`, and `kEmbedder` if it uses
// device.cpp.
#pragma once

#include <string>

namespace kernel_runtime::cuda {

// Names that users see.
struct Embedder {
    const char *name;             // of the folder in the user's cache, and in messages on stderr
    const char *driver_variable;  // environment variable with the path of the driver
    const char *nvrtc_variable;   // the same of NVRTC
    const char *cache_variable;   // the same of the folder of compiled kernels
};

extern const Embedder kEmbedder;

// Throws the library's exception for a driver, NVRTC or GPU that is missing or fails.
[[noreturn]] void fail(const std::string &message);

}  // namespace kernel_runtime::cuda
