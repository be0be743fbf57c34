// The CUDA half of the library for pytest, tests/cpp/test_cuda.py.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "kernel_runtime/native/cubin_cache.hpp"
#include "kernel_runtime/native/sources.hpp"
#include "model_on_gpu.hpp"

using namespace quant_gru::cuda;

namespace {

thread_local std::string text;

// Without streams: processes may contain several C++ libraries, whose locales differ.
struct Lines {
    std::string text;

    Lines &operator<<(const std::string &more) { return text += more, *this; }
    Lines &operator<<(char more) { return text += more, *this; }
    template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
    Lines &operator<<(Number more) {
        return text += std::to_string(more), *this;
    }
};

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
    const std::string words = macros;
    for (size_t first = 0; first < words.size();) {
        const size_t end = std::min(words.find(' ', first), words.size());
        const std::string word = words.substr(first, end - first);
        const size_t at = word.find('=');
        if (!word.empty()) kernel.macros[word.substr(0, at)] = word.substr(at + 1);
        first = end + 1;
    }
    return kernel;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char *key_of_kernel(const char *source, const char *macros, const char *arch) {
    return told([&] { return embedded_compiler().key_of(kernel_of(source, macros), arch); });
}

// The size of the machine code.
EXPORT const char *compile_kernel(const char *source, const char *macros, const char *arch) {
    return told(
        [&] { return std::to_string(machine_code(kernel_of(source, macros), arch).size()); });
}

EXPORT const char *digest_of_parts(const char *first, const char *second) {
    return told([&] { return cache_key({first, second}); });
}

// One line per launch: source, function, grid, macros, and the arguments in hexadecimal digits.
EXPORT const char *launches_of(const void *bytes, size_t size, int64_t T, int64_t N) {
    return told([&] {
        const NetworkCall call(network_of(Device::at(0), quant_gru::read_frozen(bytes, size)), T,
                               N);
        Lines lines;
        for (const Launch &each : call.launches.all()) {
            lines << each.kernel.source << '|' << each.kernel.function << '|' << each.grid.x << ' '
                  << each.grid.y << ' ' << each.grid.threads << ' ' << each.grid.cluster << ' '
                  << each.grid.shared_bytes << ' ' << each.grid.early << '|';
            for (const auto &[name, value] : each.kernel.macros)
                lines << name << '=' << value << ' ';
            lines << '|';
            for (const unsigned char byte : each.arguments)
                lines << "0123456789abcdef"[byte >> 4] << "0123456789abcdef"[byte & 15];
            lines << '\n';
        }
        return lines.text;
    });
}

// "struct size field:offset .." for each struct, in the order of its fields.
EXPORT const char *layouts() {
    return told([] {
        Lines lines;
#define STRUCT(type) lines << (lines.text.empty() ? "" : "\n") << #type << ' ' << sizeof(type)
#define FIELD(type, field) lines << ' ' << #field << ':' << offsetof(type, field)
        STRUCT(SequenceC);
        FIELD(SequenceC, x), FIELD(SequenceC, lengths), FIELD(SequenceC, x_kind);
        FIELD(SequenceC, reverse), FIELD(SequenceC, held);
        STRUCT(MatrixC);
        FIELD(MatrixC, codes), FIELD(MatrixC, m), FIELD(MatrixC, kind), FIELD(MatrixC, code_lo);
        STRUCT(TableC);
        FIELD(TableC, direct), FIELD(TableC, entries), FIELD(TableC, hi), FIELD(TableC, scale);
        FIELD(TableC, lines), FIELD(TableC, line_origin), FIELD(TableC, least);
        STRUCT(SumC<float>);
        FIELD(SumC<float>, m), FIELD(SumC<float>, lo), FIELD(SumC<float>, M);
        FIELD(SumC<float>, in_words);
        STRUCT(SumC<double>);
        FIELD(SumC<double>, hi), FIELD(SumC<double>, M), FIELD(SumC<double>, in_words);
        STRUCT(CellC<float>);
        FIELD(CellC<float>, rRh), FIELD(CellC<float>, zoneout), FIELD(CellC<float>, z);
        FIELD(CellC<float>, one), FIELD(CellC<float>, Wx_offset), FIELD(CellC<float>, h_zero);
        FIELD(CellC<float>, one_integer);
        STRUCT(CellC<double>);
        FIELD(CellC<double>, h), FIELD(CellC<double>, g), FIELD(CellC<double>, Rh_hi);
        FIELD(CellC<double>, h_offset), FIELD(CellC<double>, one_integer);
        STRUCT(DivisionC);
        FIELD(DivisionC, inverse), FIELD(DivisionC, exact);
        STRUCT(RealBoundaryC);
        FIELD(RealBoundaryC, values), FIELD(RealBoundaryC, last_nan);
        FIELD(RealBoundaryC, finite), FIELD(RealBoundaryC, next), FIELD(RealBoundaryC, hi);
        STRUCT(SaturatedC);
        FIELD(SaturatedC, new_contrib), FIELD(SaturatedC, z), FIELD(SaturatedC, g);
        FIELD(SaturatedC, rest), FIELD(SaturatedC, of_left), FIELD(SaturatedC, h_offset);
        STRUCT(RecurrentC<float>);
        FIELD(RecurrentC<float>, weights), FIELD(RecurrentC<float>, cell);
        FIELD(RecurrentC<float>, boundary), FIELD(RecurrentC<float>, counts);
        STRUCT(RecurrentC<double>);
        FIELD(RecurrentC<double>, exact_float), FIELD(RecurrentC<double>, cell);
        FIELD(RecurrentC<double>, saturated), FIELD(RecurrentC<double>, counts);
        STRUCT(StepC<float>);
        FIELD(StepC<float>, m), FIELD(StepC<float>, planes_h), FIELD(StepC<float>, cell);
        STRUCT(StepC<double>);
        FIELD(StepC<double>, Wx), FIELD(StepC<double>, before), FIELD(StepC<double>, cell);
        STRUCT(GenericC);
        FIELD(GenericC, W), FIELD(GenericC, R), FIELD(GenericC, cell);
        STRUCT(ProjectC);
        FIELD(ProjectC, W), FIELD(ProjectC, Wx), FIELD(ProjectC, planes_x), FIELD(ProjectC, wide);
        STRUCT(ProjectBytesC);
        FIELD(ProjectBytesC, to.m), FIELD(ProjectBytesC, to.Wx), FIELD(ProjectBytesC, to.T);
        FIELD(ProjectBytesC, to.NB), FIELD(ProjectBytesC, to.code_lo);
        STRUCT(ProjectPassingC);
        FIELD(ProjectPassingC, share), FIELD(ProjectPassingC, counts);
        FIELD(ProjectPassingC, stretch);
        STRUCT(ProjectRealsC);
        FIELD(ProjectRealsC, to.weights), FIELD(ProjectRealsC, real), FIELD(ProjectRealsC, nan);
        FIELD(ProjectRealsC, parts), FIELD(ProjectRealsC, division), FIELD(ProjectRealsC, fours);
        STRUCT(ProjectFewC);
        FIELD(ProjectFewC, weights), FIELD(ProjectFewC, nan_stride), FIELD(ProjectFewC, division);
        FIELD(ProjectFewC, W), FIELD(ProjectFewC, fours);
        STRUCT(TargetC);
        FIELD(TargetC, nan), FIELD(TargetC, x_offset), FIELD(TargetC, counts);
        FIELD(TargetC, stretches);
        STRUCT(QuantizeInputC);
        FIELD(QuantizeInputC, real), FIELD(QuantizeInputC, scale);
        FIELD(QuantizeInputC, division), FIELD(QuantizeInputC, fours);
        STRUCT(RequantizeLayersC);
        FIELD(RequantizeLayersC, below), FIELD(RequantizeLayersC, codes);
        FIELD(RequantizeLayersC, k), FIELD(RequantizeLayersC, directions);
        FIELD(RequantizeLayersC, out_zero);
        return lines.text;
    });
}

EXPORT const char *embedded_sources() {
    return told([&] {
        std::string names;
        for (size_t i = 0; i < kSourceCount; ++i) names += std::string(kSources[i].name) + "\n";
        return names;
    });
}
