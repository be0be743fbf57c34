// Compiles the embedded CUDA sources with NVRTC, which is opened at run time.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace kernel_runtime::cuda {

// A function of an embedded source, specialized by macros.
struct Kernel {
    std::string source;    // name of a .cu file without its ending, such as "recurrence/persistent"
    std::string function;  // such as "recurrent"
    std::map<std::string, std::string> macros;
};

// The machine code of a kernel for an architecture such as "sm_90a", from the cache on disk if it
// is there. Several threads may compile at once. Fails: NVRTC is missing, or it rejects the source.
// NVRTC is libnvrtc.so.13 or libnvrtc.so.12, or the library that the environment names.
std::string machine_code(const Kernel &kernel, const std::string &arch);

// The key of that code in the cache on disk. The Python package has the same keys.
std::string key_of(const Kernel &kernel, const std::string &arch);

}  // namespace kernel_runtime::cuda
