#include "kernel_runtime/native/driver.hpp"

#include "kernel_runtime/native/embedder.hpp"
#include "kernel_runtime/native/shared_library.hpp"

namespace kernel_runtime::cuda {
namespace {

constexpr int kOldest = 12000;  // as the driver counts versions

}  // namespace

std::string driver_library(const char *variable) {
    return library_names(variable, {"libcuda.so.1"}, {"nvcuda.dll"}).front();
}

Driver::Driver(const std::string &library)
    : Driver([opened = SharedLibrary("the driver of an NVIDIA GPU", {library},
                                     "libcuda.so.1 is a part of it")](const char *name) {
          return opened.address(name);
      }) {}

Driver::Driver(const std::function<void *(const char *name)> &find) {
    const auto set = [&find](auto *&function, const char *name) {
        function = reinterpret_cast<decltype(+function)>(find(name));
        return function != nullptr;
    };
    const auto need = [&set](auto *&function, const char *name) {
        if (!set(function, name))
            fail("Expected the driver of an NVIDIA GPU to have the function " + std::string(name) +
                 ", got an older version");
    };
    int (*initialize)(unsigned flags), (*get_version)(int *version), version = 0;
    need(initialize, "cuInit");
    need(get_version, "cuDriverGetVersion");
    need(cuGetErrorName, "cuGetErrorName");
    if (const int status = initialize(0)) fail("Expected a GPU of NVIDIA, got " + name_of(status));
    check(get_version(&version));
    if (version < kOldest)
        fail("Expected a driver of CUDA 12 or later, got " + std::to_string(version / 1000) + "." +
             std::to_string(version % 1000 / 10));
#define NEED(symbol, name, parameters) need(name, #symbol);
#define USE(symbol, name, parameters) has_graphs = set(name, #symbol) && has_graphs;
    KERNEL_RUNTIME_DRIVER(NEED)
    KERNEL_RUNTIME_GRAPHS(USE)
#undef NEED
#undef USE
}

void Driver::check(int status) const {
    if (status) fail("Expected the CUDA driver to succeed, got " + name_of(status));
}

std::string Driver::name_of(int status) const {
    const char *name = nullptr;
    cuGetErrorName(status, &name);
    return name ? name : std::to_string(status);
}

}  // namespace kernel_runtime::cuda
