#include "passes/pointers.hpp"

#include <atomic>
#include <string>

#if defined(_WIN32)
#include <windows.h>
#elif defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#endif

#include "cuda/host/runtime.hpp"
#include "kernel_runtime/native/sources.hpp"
#include "passes/on_device.hpp"

namespace quant_gru {
namespace {

enum : int { kMemoryType = 2, kOrdinal = 9 };  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, _DEVICE_ORDINAL
constexpr unsigned kDeviceMemory = 2;          // CU_MEMORYTYPE_DEVICE

using GetAttribute = int (*)(void *to, int attribute, uint64_t address);

#if defined(_WIN32)
GetAttribute opened() {
    const HMODULE library = GetModuleHandleA(cuda::driver_name().c_str());
    if (!library) return nullptr;
    return reinterpret_cast<GetAttribute>(GetProcAddress(library, "cuPointerGetAttribute"));
}
#elif defined(__linux__)
GetAttribute opened() {
    // to ask for a library that is not open takes microseconds, so ask only if others were opened
    static std::atomic<unsigned long long> without{0};
    unsigned long long count = 0;
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *to) {
            *static_cast<unsigned long long *>(to) = info->dlpi_adds;
            return 1;  // stops
        },
        &count);
    if (count == without) return nullptr;
    void *const library = dlopen(cuda::driver_name().c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library) return reinterpret_cast<GetAttribute>(dlsym(library, "cuPointerGetAttribute"));
    without = count;
    return nullptr;
}
#else
GetAttribute opened() { return nullptr; }  // no GPUs of NVIDIA
#endif

// cuPointerGetAttribute if the process has opened the driver, otherwise null: there is no memory of
// a GPU then, and programs without one do not wait for the driver.
GetAttribute attribute_function() {
    static std::atomic<GetAttribute> found{nullptr};
    GetAttribute function = found;
    if (!function) found = function = opened();
    return function;
}

int place_of(GetAttribute attribute, const void *data) {
    const auto address = reinterpret_cast<uint64_t>(data);
    unsigned type = 0;
    int device = 0;
    // an error: memory that the driver does not know
    if (attribute(&type, kMemoryType, address) || type != kDeviceMemory) return kHost;
    return attribute(&device, kOrdinal, address) ? kHost : device;
}

std::string text(int place) {
    return place == kHost ? "on the host" : "on GPU " + std::to_string(place);
}

}  // namespace

int place_of(std::initializer_list<NamedArray> arrays) {
    const GetAttribute attribute = attribute_function();
    if (!attribute) return kHost;
    const NamedArray *first = nullptr;
    int place = kHost;
    for (const NamedArray &each : arrays) {
        if (!each.data) continue;
        const int found = place_of(attribute, each.data);
        if (!first) {
            first = &each;
            place = found;
        }
        if (found != place)
            throw ArgumentError("Expected " + std::string(each.name) + " to be " + text(place) +
                                " as " + first->name + " is, got memory " + text(found));
    }
    return place;
}

}  // namespace quant_gru
