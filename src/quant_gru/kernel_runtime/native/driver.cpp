#include "kernel_runtime/native/driver.hpp"

#include <string>

#include "kernel_runtime/native/embedder.hpp"
#include "kernel_runtime/native/shared_library.hpp"

namespace kernel_runtime::cuda {
namespace {

Driver opened() {
    const SharedLibrary library("the driver of an NVIDIA GPU", {driver_name()},
                                "libcuda.so.1 is a part of it");
    Driver d;
    library.find(d.cuInit, "cuInit");
    library.find(d.cuDeviceGetCount, "cuDeviceGetCount");
    library.find(d.cuDeviceGet, "cuDeviceGet");
    library.find(d.cuDeviceGetAttribute, "cuDeviceGetAttribute");
    library.find(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    library.find(d.cuCtxGetCurrent, "cuCtxGetCurrent");
    library.find(d.cuCtxSetCurrent, "cuCtxSetCurrent");
    library.find(d.cuModuleLoadData, "cuModuleLoadData");
    library.find(d.cuModuleGetFunction, "cuModuleGetFunction");
    library.find(d.cuFuncSetAttribute, "cuFuncSetAttribute");
    library.find(d.cuLaunchKernelEx, "cuLaunchKernelEx");
    library.find(d.cuOccupancyMaxActiveClusters, "cuOccupancyMaxActiveClusters");
    library.find(d.cuMemAlloc, "cuMemAlloc_v2");
    library.find(d.cuMemFree, "cuMemFree_v2");
    library.find(d.cuMemcpyHtoD, "cuMemcpyHtoD_v2");
    library.find(d.cuMemcpyDtoH, "cuMemcpyDtoH_v2");
    library.find(d.cuMemsetD8, "cuMemsetD8_v2");
    library.find(d.cuStreamSynchronize, "cuStreamSynchronize");
    library.find(d.cuGetErrorName, "cuGetErrorName");
    if (const int status = d.cuInit(0)) {
        const char *name = nullptr;
        d.cuGetErrorName(status, &name);
        fail("Expected a GPU of NVIDIA, got " +
             (name ? std::string(name) : std::to_string(status)));
    }
    return d;
}

}  // namespace

std::string driver_name() {
    return library_names(kEmbedder.driver_variable, {"libcuda.so.1"}, {"nvcuda.dll"}).front();
}

const Driver &driver() {
    static const Driver found = opened();
    return found;
}

void check(int status) {
    if (status == 0) return;
    const char *name = nullptr;
    driver().cuGetErrorName(status, &name);
    fail("Expected the CUDA driver to succeed, got " +
         (name ? std::string(name) : std::to_string(status)));
}

void *primary_context(int index) {
    int device = 0;
    void *context = nullptr;
    check(driver().cuDeviceGet(&device, index));
    check(driver().cuDevicePrimaryCtxRetain(&context, device));
    return context;
}

}  // namespace kernel_runtime::cuda
