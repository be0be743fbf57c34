// The CUDA driver, opened at run time. The names, types and values are those that the
// documentation of the driver API gives; no header of the CUDA toolkit is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

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

enum : int {
    kMaxDynamicShared = 8,      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kNonPortableCluster = 14,   // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    kMultiprocessorCount = 16,  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    kCapabilityMajor = 75,      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    kCapabilityMinor = 76,      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
};

// The functions of libcuda that are called: the name in the library, ours, and the parameters.
#define KERNEL_RUNTIME_DRIVER(FUNCTION)                                                           \
    FUNCTION(cuDeviceGetCount, cuDeviceGetCount, (int *count))                                    \
    FUNCTION(cuDeviceGet, cuDeviceGet, (int *device, int index))                                  \
    FUNCTION(cuDeviceGetAttribute, cuDeviceGetAttribute, (int *value, int attribute, int device)) \
    FUNCTION(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (void **context, int device))    \
    FUNCTION(cuCtxGetCurrent, cuCtxGetCurrent, (void **context))                                  \
    FUNCTION(cuCtxSetCurrent, cuCtxSetCurrent, (void *context))                                   \
    FUNCTION(cuModuleLoadData, cuModuleLoadData, (void **module, const void *image))              \
    FUNCTION(cuModuleGetFunction, cuModuleGetFunction,                                            \
             (void **function, void *module, const char *name))                                   \
    FUNCTION(cuFuncSetAttribute, cuFuncSetAttribute, (void *function, int attribute, int value))  \
    FUNCTION(cuLaunchKernelEx, cuLaunchKernelEx,                                                  \
             (const LaunchConfig *config, void *function, void **parameters, void **extra))       \
    FUNCTION(cuOccupancyMaxActiveClusters, cuOccupancyMaxActiveClusters,                          \
             (int *count, void *function, const LaunchConfig *config))                            \
    FUNCTION(cuMemAlloc_v2, cuMemAlloc, (Address * address, size_t bytes))                        \
    FUNCTION(cuMemFree_v2, cuMemFree, (Address address))                                          \
    FUNCTION(cuMemcpyHtoD_v2, cuMemcpyHtoD, (Address to, const void *from, size_t bytes))         \
    FUNCTION(cuMemcpyDtoH_v2, cuMemcpyDtoH, (void *to, Address from, size_t bytes))               \
    FUNCTION(cuStreamSynchronize, cuStreamSynchronize, (Stream stream))

// Those of graphs, all or none of which can be used.
#define KERNEL_RUNTIME_GRAPHS(FUNCTION)                                                         \
    FUNCTION(cuStreamCreate, cuStreamCreate, (Stream * stream, unsigned flags))                 \
    FUNCTION(cuStreamIsCapturing, cuStreamIsCapturing, (Stream stream, int *status))            \
    FUNCTION(cuStreamBeginCapture_v2, cuStreamBeginCapture, (Stream stream, int mode))          \
    FUNCTION(cuStreamEndCapture, cuStreamEndCapture, (Stream stream, void **graph))             \
    FUNCTION(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int *mode)) \
    FUNCTION(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,                          \
             (void **executable, void *graph, unsigned long long flags))                        \
    FUNCTION(cuGraphUpload, cuGraphUpload, (void *executable, Stream stream))                   \
    FUNCTION(cuGraphLaunch, cuGraphLaunch, (void *executable, Stream stream))                   \
    FUNCTION(cuGraphDestroy, cuGraphDestroy, (void *graph))                                     \
    FUNCTION(cuGraphExecDestroy, cuGraphExecDestroy, (void *executable))

// Each function returns 0 or an error.
struct Driver {
    // Opens a library.
    explicit Driver(const std::string &library);

    // find: returns the address of a function, by the name that the library exports, or null.
    // Fails: no GPU, a driver older than CUDA 12, or one that lacks a function.
    explicit Driver(const std::function<void *(const char *name)> &find);

    // Fails unless the status is 0.
    void check(int status) const;

#define KERNEL_RUNTIME_DECLARE(symbol, name, parameters) int(*name) parameters;
    KERNEL_RUNTIME_DRIVER(KERNEL_RUNTIME_DECLARE)
    KERNEL_RUNTIME_GRAPHS(KERNEL_RUNTIME_DECLARE)
#undef KERNEL_RUNTIME_DECLARE
    int (*cuGetErrorName)(int status, const char **name);
    bool has_graphs = true;

 private:
    std::string name_of(int status) const;
};

// libcuda.so.1 or nvcuda.dll, or the path that an environment variable of this name has.
std::string driver_library(const char *variable);

}  // namespace kernel_runtime::cuda
