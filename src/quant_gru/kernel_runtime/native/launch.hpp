// Descriptions of launches.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace kernel_runtime::cuda {

using Address = uint64_t;  // CUdeviceptr

// A function of a source, specialized by macros.
struct Kernel {
    std::string source;  // name of a .cu file without its ending, such as "folder/file"
    std::string function;
    std::map<std::string, std::string> macros;

    bool operator==(const Kernel &o) const {
        return source == o.source && function == o.function && macros == o.macros;
    }
};

// The dimensions of a launch.
struct Grid {
    unsigned x = 1, y = 1;      // blocks
    unsigned threads = 1;       // per block
    unsigned cluster = 1;       // blocks in x that form a cluster
    unsigned shared_bytes = 0;  // dynamic shared memory of a block
    bool early = false;  // blocks may start before the previous launch ends; the kernel then waits
    bool together = false;  // blocks wait for each other, so that all must be resident at once
};

}  // namespace kernel_runtime::cuda
