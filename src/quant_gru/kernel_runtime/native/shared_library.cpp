#include "kernel_runtime/native/shared_library.hpp"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <cstdlib>

#include "kernel_runtime/native/embedder.hpp"

namespace kernel_runtime::cuda {

#if defined(_WIN32)
namespace {

void *dlopen(const char *name, int) { return static_cast<void *>(LoadLibraryA(name)); }
void *dlsym(void *handle, const char *name) {
    return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(handle), name));
}
const char *dlerror() { return "a library that does not load"; }
constexpr int RTLD_NOW = 0;

}  // namespace
#endif

std::string environment(const char *name) {
    const char *value = std::getenv(name);
    return value ? value : "";
}

std::vector<std::string> library_names(const char *variable,
                                       [[maybe_unused]] std::vector<std::string> on_linux,
                                       [[maybe_unused]] std::vector<std::string> on_windows) {
    const std::string chosen = environment(variable);
    if (!chosen.empty()) return {chosen};
#if defined(_WIN32)
    return on_windows;
#else
    return on_linux;
#endif
}

bool is_open(const std::string &name) {
#if defined(_WIN32)
    return GetModuleHandleA(name.c_str()) != nullptr;
#else
    return dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr;
#endif
}

void open_if_found(const std::string &name) { dlopen(name.c_str(), RTLD_NOW); }

SharedLibrary::SharedLibrary(const char *what, const std::vector<std::string> &names,
                             const char *advice)
    : what_(what) {
    std::string reason;
    for (const std::string &name : names) {
        handle_ = dlopen(name.c_str(), RTLD_NOW);
        name_ = name;
        if (handle_) return;
        const char *error = dlerror();
        if (reason.empty() && error) reason = error;
    }
    fail("Expected " + std::string(what) + " to be installed (" + advice + "), got " + reason);
}

void *SharedLibrary::address(const char *name) const { return dlsym(handle_, name); }

void *SharedLibrary::symbol(const char *name) const {
    void *const found = address(name);
    if (!found)
        fail("Expected " + std::string(what_) + " to have the function " + name +
             ", got an older version");
    return found;
}

void SharedLibrary::open_beside(const std::string &name) const {
    const size_t end = name_.find_last_of("/\\");
    if (end != std::string::npos) open_if_found(name_.substr(0, end + 1) + name);
}

}  // namespace kernel_runtime::cuda
