// The configuration of a launch as the driver reads it. The names, types and values are those that
// the documentation of the driver API gives.
#pragma once

#include <cstdint>

#include "kernel_runtime/native/launch.hpp"

namespace kernel_runtime::cuda {

using Stream = void *;  // CUstream; null is the legacy default stream

struct LaunchAttribute {  // CUlaunchAttribute
    int id, pad;
    uint32_t value[16];
};

constexpr int kClusterDimension = 4;  // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared_bytes;
    Stream stream;
    const LaunchAttribute *attributes;
    unsigned count;
};

// It must not be copied.
class Configured {
 public:
    Configured(const Grid &grid, Stream stream) {
        constexpr int kCooperative = 2;  // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        constexpr int kEarly = 6;        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        if (grid.cluster > 1) add(kClusterDimension, {grid.cluster, 1, 1});
        if (grid.together) add(kCooperative, {1, 0, 0});
        if (grid.early) add(kEarly, {1, 0, 0});
        config.grid[0] = grid.x;
        config.grid[1] = grid.y;
        config.block[0] = grid.threads;
        config.grid[2] = config.block[1] = config.block[2] = 1;
        config.shared_bytes = grid.shared_bytes;
        config.stream = stream;
        config.attributes = config.count ? attributes_ : nullptr;
    }
    Configured(const Configured &) = delete;
    Configured &operator=(const Configured &) = delete;

    LaunchConfig config{};

 private:
    struct Three {
        uint32_t x, y, z;
    };
    void add(int id, Three value) {
        LaunchAttribute &each = attributes_[config.count++];
        each.id = id;
        each.value[0] = value.x;
        each.value[1] = value.y;
        each.value[2] = value.z;
    }
    LaunchAttribute attributes_[3]{};
};

}  // namespace kernel_runtime::cuda
