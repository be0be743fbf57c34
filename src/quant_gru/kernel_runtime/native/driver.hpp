// The CUDA driver, opened at run time. The names, types and values are those that the
// documentation of the driver API gives; no header of the CUDA toolkit is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel_runtime/native/launch_config.hpp"

namespace kernel_runtime::cuda {

enum : int {
    kMaxDynamicShared = 8,      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kNonPortableCluster = 14,   // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    kMultiprocessorCount = 16,  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    kCapabilityMajor = 75,      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    kCapabilityMinor = 76,      // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    kSharedOptIn = 97,          // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
};

// The functions of libcuda that the library calls. Each returns 0 or an error.
struct Driver {
    int (*cuInit)(unsigned flags);
    int (*cuDeviceGetCount)(int *count);
    int (*cuDeviceGet)(int *device, int index);
    int (*cuDeviceGetAttribute)(int *value, int attribute, int device);
    int (*cuDevicePrimaryCtxRetain)(void **context, int device);
    int (*cuCtxGetCurrent)(void **context);
    int (*cuCtxSetCurrent)(void *context);
    int (*cuModuleLoadData)(void **module, const void *image);
    int (*cuModuleGetFunction)(void **function, void *module, const char *name);
    int (*cuFuncSetAttribute)(void *function, int attribute, int value);
    int (*cuLaunchKernelEx)(const LaunchConfig *config, void *function, void **parameters,
                            void **extra);
    int (*cuOccupancyMaxActiveClusters)(int *count, void *function, const LaunchConfig *config);
    int (*cuMemAlloc)(Address *address, size_t bytes);
    int (*cuMemFree)(Address address);
    int (*cuMemcpyHtoD)(Address to, const void *from, size_t bytes);
    int (*cuMemcpyDtoH)(void *to, Address from, size_t bytes);
    int (*cuMemsetD8)(Address to, unsigned char value, size_t bytes);
    int (*cuStreamSynchronize)(Stream stream);
    int (*cuGetErrorName)(int status, const char **name);
};

// libcuda.so.1, or the library that the environment names.
std::string driver_name();

// Opens it at the first call, or fails.
const Driver &driver();

// Fails unless the status is 0.
void check(int status);

// Makes a context current, then restores the previous one, which other libraries use.
class CurrentContext {
 public:
    explicit CurrentContext(void *context) {
        check(driver().cuCtxGetCurrent(&before_));
        changed_ = before_ != context;
        if (changed_) check(driver().cuCtxSetCurrent(context));
    }
    CurrentContext(const CurrentContext &) = delete;
    CurrentContext &operator=(const CurrentContext &) = delete;
    ~CurrentContext() {
        if (changed_) driver().cuCtxSetCurrent(before_);
    }

 private:
    void *before_ = nullptr;
    bool changed_ = false;
};

// The primary context of a GPU, as in the CUDA runtime and in PyTorch. It is never released.
void *primary_context(int index);

}  // namespace kernel_runtime::cuda
