// The CUDA half of the library for pytest, tests/cpp/test_cuda.py.
#include <cstring>
#include <sstream>
#include <string>

#include "cuda/compiler.hpp"
#include "cuda/cubin_cache.hpp"
#include "cuda/sources.hpp"

using namespace quant_gru::cuda;

namespace {

thread_local std::string text;

// Runs f, which returns a text; an error is "!" and its message.
template <class F>
const char *told(F f) {
    try {
        text = f();
    } catch (const std::exception &error) {
        text = std::string("!") + error.what();
    }
    return text.c_str();
}

// Macros are "NAME=VALUE" words.
Kernel kernel_of(const char *source, const char *macros) {
    Kernel kernel{source, "", {}};
    std::istringstream words(macros);
    for (std::string word; words >> word;) {
        const size_t at = word.find('=');
        kernel.macros[word.substr(0, at)] = word.substr(at + 1);
    }
    return kernel;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *key_of_kernel(const char *source, const char *macros, const char *arch) {
    return told([&] { return key_of(kernel_of(source, macros), arch); });
}

// The size of the machine code.
EXPORT const char *compile_kernel(const char *source, const char *macros, const char *arch) {
    return told(
        [&] { return std::to_string(machine_code(kernel_of(source, macros), arch).size()); });
}

EXPORT const char *digest_of_parts(const char *first, const char *second) {
    return told([&] { return cache_key({first, second}); });
}

EXPORT const char *embedded_sources() {
    return told([&] {
        std::string names;
        for (size_t i = 0; i < kSourceCount; ++i) names += std::string(kSources[i].name) + "\n";
        return names;
    });
}
