#include <cstdio>
#include <map>
#include <memory>
#include <mutex>

#include "kernel_runtime/native/cubin_cache.hpp"
#include "kernel_runtime/native/device.hpp"
#include "kernel_runtime/native/embedder.hpp"
#include "kernel_runtime/native/shared_library.hpp"
#include "kernel_runtime/native/sources.hpp"

namespace kernel_runtime::cuda {
namespace {

Compiler opened() {
    const SharedLibrary library(
        "NVRTC",
        library_names(kEmbedder.nvrtc_variable, {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"},
                      {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"}),
        ("set " + std::string(kEmbedder.nvrtc_variable) +
         " to the path of libnvrtc.so.13, which the CUDA toolkit and the "
         "package nvidia-cuda-nvrtc have")
            .c_str());
    std::vector<uintptr_t> addresses;
    for (const char *name : Compiler::kFunctions) {
        void *found = nullptr;
        library.find(found, name);
        addresses.push_back(reinterpret_cast<uintptr_t>(found));
    }
    Compiler::Texts texts;
    for (size_t i = 0; i < kSourceCount; ++i) texts[kSources[i].name] = kSources[i].text;
    Compiler compiler(addresses, texts);
    // NVRTC opens it by name, which finds it in a folder of its own only if it is open already
    library.open_beside("libnvrtc-builtins.so." + compiler.version());
    return compiler;
}

CubinCache cache() {
    return {kEmbedder.cache_variable, kEmbedder.name, [](const std::string &message) {
                std::fprintf(stderr, "%s: %s\n", kEmbedder.name, message.c_str());
            }};
}

}  // namespace

const Compiler &embedded_compiler() {
    static const Compiler found = opened();
    return found;
}

std::string machine_code(const Kernel &kernel, const std::string &arch) {
    const Compiler &compiler = embedded_compiler();
    const CubinCache found = cache();
    const std::string key = compiler.key_of(kernel, arch);
    std::string code = found.load(key);
    if (code.empty()) {
        code = compiler.compile(kernel, arch);
        found.store(key, code);
    }
    return code;
}

std::string driver_name() { return driver_library(kEmbedder.driver_variable); }

Device &Device::at(int index) {
    static std::mutex mutex;
    static std::map<int, std::unique_ptr<Device>> *const all =
        new std::map<int, std::unique_ptr<Device>>;  // outlives every static object
    static const Driver *const driver = new Driver(driver_name());
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device> &found = (*all)[index];
    if (!found) found = std::make_unique<Device>(*driver, index, machine_code, nullptr, false);
    return *found;
}

}  // namespace kernel_runtime::cuda
