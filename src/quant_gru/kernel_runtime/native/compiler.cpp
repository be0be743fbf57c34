#include "kernel_runtime/native/compiler.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "kernel_runtime/native/cubin_cache.hpp"
#include "kernel_runtime/native/embedder.hpp"
#include "kernel_runtime/native/shared_library.hpp"
#include "kernel_runtime/native/sources.hpp"

namespace kernel_runtime::cuda {
namespace {

struct Nvrtc {
    int (*nvrtcVersion)(int *major, int *minor);
    int (*nvrtcCreateProgram)(void **program, const char *source, const char *name, int headers,
                              const char *const *texts, const char *const *names);
    int (*nvrtcCompileProgram)(void *program, int count, const char *const *options);
    int (*nvrtcGetCUBINSize)(void *program, size_t *size);
    int (*nvrtcGetCUBIN)(void *program, char *code);
    int (*nvrtcGetProgramLogSize)(void *program, size_t *size);
    int (*nvrtcGetProgramLog)(void *program, char *log);
    int (*nvrtcDestroyProgram)(void **program);
    const char *(*nvrtcGetErrorString)(int status);
    int major = 0, minor = 0;

    std::string version() const { return std::to_string(major) + "." + std::to_string(minor); }
};

Nvrtc opened() {
    const SharedLibrary library(
        "NVRTC",
        library_names(kEmbedder.nvrtc_variable, {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"},
                      {"nvrtc64_130_0.dll", "nvrtc64_120_0.dll"}),
        ("set " + std::string(kEmbedder.nvrtc_variable) +
         " to the path of libnvrtc.so.13, which the CUDA toolkit and the "
         "package nvidia-cuda-nvrtc have")
            .c_str());
    Nvrtc n;
    library.find(n.nvrtcVersion, "nvrtcVersion");
    library.find(n.nvrtcCreateProgram, "nvrtcCreateProgram");
    library.find(n.nvrtcCompileProgram, "nvrtcCompileProgram");
    library.find(n.nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
    library.find(n.nvrtcGetCUBIN, "nvrtcGetCUBIN");
    library.find(n.nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
    library.find(n.nvrtcGetProgramLog, "nvrtcGetProgramLog");
    library.find(n.nvrtcDestroyProgram, "nvrtcDestroyProgram");
    library.find(n.nvrtcGetErrorString, "nvrtcGetErrorString");
    n.nvrtcVersion(&n.major, &n.minor);
    // NVRTC opens it by name, which finds it in a folder of its own only if it is open already
    library.open_beside("libnvrtc-builtins.so." + n.version());
    return n;
}

const Nvrtc &nvrtc() {
    static const Nvrtc found = opened();
    return found;
}

void expect_success(int status) {
    if (status)
        fail("Expected NVRTC to succeed, got " + std::string(nvrtc().nvrtcGetErrorString(status)));
}

const char *source_text(const std::string &name) {
    for (size_t i = 0; i < kSourceCount; ++i)
        if (kSources[i].name == name) return kSources[i].text;
    fail("Expected the name of an embedded source, got '" + name + "'");
}

bool is_header(const Source &source) {
    const std::string name = source.name;
    return name.size() < 3 || name.compare(name.size() - 3, 3, ".cu") != 0;
}

// Names and texts of all headers. Each program receives all of them.
struct Headers {
    std::vector<const char *> names, texts;

    Headers() {
        std::vector<const Source *> found;
        for (size_t i = 0; i < kSourceCount; ++i)
            if (is_header(kSources[i])) found.push_back(&kSources[i]);
        std::sort(found.begin(), found.end(),
                  [](const Source *a, const Source *b) { return std::string(a->name) < b->name; });
        for (const Source *each : found) {
            names.push_back(each->name);
            texts.push_back(each->text);
        }
    }
};

const Headers &headers() {
    static const Headers found;
    return found;
}

std::vector<std::string> options_of(const Kernel &kernel, const std::string &arch) {
    // --fmad=false: products and sums are rounded separately, as written.
    std::vector<std::string> options{"--device-as-default-execution-space", "--std=c++17",
                                     "--fmad=false"};
    const Nvrtc &n = nvrtc();
    if (std::make_pair(n.major, n.minor) >= std::make_pair(12, 4)) options.push_back("--minimal");
    options.push_back("--gpu-architecture=" + arch);
    for (const auto &[name, value] : kernel.macros) options.push_back("-D" + name + "=" + value);
    return options;
}

std::string key_of(const Kernel &kernel, const std::vector<std::string> &options) {
    std::vector<std::string> parts{source_text(kernel.source + ".cu")};
    parts.insert(parts.end(), headers().names.begin(), headers().names.end());
    parts.insert(parts.end(), headers().texts.begin(), headers().texts.end());
    parts.insert(parts.end(), options.begin(), options.end());
    parts.push_back(nvrtc().version());
    return cache_key(parts);
}

std::string log_of(void *program) {
    size_t size = 0;
    if (nvrtc().nvrtcGetProgramLogSize(program, &size) || !size) return {};
    std::string log(size, '\0');
    nvrtc().nvrtcGetProgramLog(program, log.data());
    return log.c_str();
}

std::string compiled(const Kernel &kernel, const std::vector<std::string> &options) {
    const Nvrtc &n = nvrtc();
    const std::string name = kernel.source + ".cu";
    void *program = nullptr;
    expect_success(n.nvrtcCreateProgram(&program, source_text(name), name.c_str(),
                                        static_cast<int>(headers().names.size()),
                                        headers().texts.data(), headers().names.data()));
    const auto destroy = [&n](void *each) { n.nvrtcDestroyProgram(&each); };
    const std::unique_ptr<void, decltype(destroy)> owner(program, destroy);
    std::vector<const char *> given;
    std::string text;
    for (const std::string &option : options) {
        given.push_back(option.c_str());
        text += " " + option;
    }
    if (n.nvrtcCompileProgram(program, static_cast<int>(given.size()), given.data()))
        fail("Expected NVRTC " + n.version() + " to compile " + name + " with" + text + ", got\n" +
             log_of(program));
    size_t size = 0;
    expect_success(n.nvrtcGetCUBINSize(program, &size));
    std::string code(size, '\0');
    expect_success(n.nvrtcGetCUBIN(program, code.data()));
    return code;
}

}  // namespace

std::string machine_code(const Kernel &kernel, const std::string &arch) {
    const std::vector<std::string> options = options_of(kernel, arch);
    const std::string key = key_of(kernel, options);
    std::string code = load_cubin(key);
    if (code.empty()) {
        code = compiled(kernel, options);
        store_cubin(key, code);
    }
    return code;
}

std::string key_of(const Kernel &kernel, const std::string &arch) {
    return key_of(kernel, options_of(kernel, arch));
}

}  // namespace kernel_runtime::cuda
