#include "bindings/cpu_module.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/plan_from_dict.hpp"
#include "bindings/prepared_call.hpp"
#include "c99/philox.h"
#include "cpu/core/boundary.hpp"
#include "cpu/core/stack.hpp"
#include "cpu/core/tasks.hpp"
#include "cpu/core/threads.hpp"
#include "cpu/training/backward.hpp"
#include "cpu/training/weights.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

const char *kind(const Layer &layer) {
    switch (layer.kind()) {
        case Layer::Kind::fused:
            if (layer.fused().powers) return "fused, float32, powers of two";
            return layer.in_float() ? "fused, float32" : "fused, float64";
        case Layer::Kind::general:
            return layer.in_float() ? "general, float32" : "general, float64";
        default:
            return "wide";
    }
}

// Runs a layer on contiguous codes.
void run_layer(const Layer &layer, uintptr_t x, uintptr_t h0, uintptr_t out, uintptr_t last,
               int64_t T, int64_t N, uintptr_t lengths, uintptr_t held, bool reverse, int threads) {
    const int64_t H = layer.H(), C = layer.C();
    Job job;
    job.x = {reinterpret_cast<const void *>(x), false, N * C, C};
    job.h0 = {reinterpret_cast<const void *>(h0), false, 0, H};
    job.out.codes = reinterpret_cast<void *>(out);
    job.out.codes_step = N * H;
    job.out.codes_row = H;
    job.last.codes = reinterpret_cast<void *>(last);
    job.last.codes_row = H;
    job.lengths = reinterpret_cast<const int64_t *>(lengths);
    job.held = reinterpret_cast<const uint8_t *>(held);
    job.T = T;
    job.N = N;
    job.reverse = reverse;
    nb::gil_scoped_release release;
    Scratch scratch;
    run_tasks({{&layer, job}}, threads, scratch);
}

// The keys of `d` are the names of the fields of BackwardCall.
void run_layer_backward(const Layer &layer, const nb::dict &d) {
    auto number = [&](const char *name) { return nb::cast<int64_t>(d[name]); };
    auto address = [&](const char *name) {
        return reinterpret_cast<void *>(nb::cast<uintptr_t>(d[name]));
    };
    auto real = [&](const char *name) { return static_cast<float *>(address(name)); };
    auto scale = [&](const char *name) { return nb::cast<double>(d[name]); };
    BackwardCall call;
    call.x = address("x");
    call.h0 = address("h0");
    call.out = address("out");
    call.held = static_cast<const uint8_t *>(address("held"));
    call.lengths = static_cast<const int64_t *>(address("lengths"));
    call.T = number("T");
    call.N = number("N");
    call.reverse = nb::cast<bool>(d["reverse"]);
    call.W = address("W");
    call.R = address("R");
    call.W_bytes = static_cast<int>(number("W_bytes"));
    call.R_bytes = static_cast<int>(number("R_bytes"));
    call.W_scales = real("W_scales");
    call.R_scales = real("R_scales");
    call.scales = {scale("s_x"), scale("s_h"), scale("s_Rh"),
                   scale("s_z"), scale("s_r"), scale("s_g")};
    call.grad_out = real("grad_out");
    call.grad_last = real("grad_last");
    call.grad_step = number("grad_step");
    call.grad_row = number("grad_row");
    call.dx = real("dx");
    call.dh0 = real("dh0");
    call.dh = real("dh");
    call.dW = real("dW");
    call.dR = real("dR");
    call.dbw = real("dbw");
    call.dbr = real("dbr");
    call.chunk_items = number("chunk_items");
    call.threads = static_cast<int>(number("threads"));
    nb::gil_scoped_release release;
    run_backward(layer, call);
}

// Shift and multiplier, quantizers of the codes below and above.
using RequantizerTuple = std::tuple<int64_t, int64_t, QuantizerTuple, QuantizerTuple>;

Requantizer requantizer_of(const RequantizerTuple &r) {
    const auto &[k, M, below, above] = r;
    return requantizer({1, k, {M, 0}}, quantizer_numbers(below), quantizer_numbers(above));
}

// For each layer above the first, each of its directions and each direction below.
using Between = std::vector<std::vector<std::vector<RequantizerTuple>>>;

void make_stack(Stack *self, const std::vector<std::vector<const Layer *>> &layers,
                const Between &numbers, const std::vector<uintptr_t> &finite, const nb::object &) {
    std::vector<const uint8_t *> flags;
    for (uintptr_t each : finite) flags.push_back(reinterpret_cast<const uint8_t *>(each));
    std::vector<std::vector<std::vector<Requantizer>>> between;
    for (const auto &layer : numbers) {
        auto &directions = between.emplace_back();
        for (const auto &halves : layer) {
            auto &found = directions.emplace_back();
            for (const RequantizerTuple &half : halves) found.push_back(requantizer_of(half));
        }
    }
    new (self) Stack(layers, std::move(between), std::move(flags));
}

void run_stack(Stack &stack, uintptr_t x, int64_t x_step, int64_t x_row, uintptr_t h0, uintptr_t y,
               int64_t y_step, int64_t y_row, uintptr_t last, const std::vector<uintptr_t> &kept,
               uintptr_t lengths, int64_t T, int64_t N, int threads) {
    Stack::Call call;
    call.x = reinterpret_cast<const float *>(x);
    call.x_step = x_step;
    call.x_row = x_row;
    call.h0 = reinterpret_cast<const float *>(h0);
    call.y = reinterpret_cast<float *>(y);
    call.y_step = y_step;
    call.y_row = y_row;
    call.last = reinterpret_cast<float *>(last);
    if (!kept.empty()) call.kept = reinterpret_cast<void *const *>(kept.data());
    call.lengths = reinterpret_cast<const int64_t *>(lengths);
    call.T = T;
    call.N = N;
    call.threads = threads;
    nb::gil_scoped_release release;
    stack.run(call);
}

// A stack with states in the caller's memory. A step is so short that it keeps the GIL.
struct Stream {
    Stack *stack;
    int64_t N;
    std::vector<uintptr_t> states;

    bool step(uintptr_t x, uintptr_t y) const {
        return stack->step(reinterpret_cast<const float *>(x), N,
                           reinterpret_cast<void *const *>(states.data()),
                           reinterpret_cast<float *>(y));
    }
};

// Writes bytes (A, B, C): 1 where the random word of (a, b, c) is below `chance`.
void events(uintptr_t to, int64_t A, int64_t B, int64_t C, uint64_t seed, uint32_t stream,
            uint64_t chance) {
    auto *bytes = reinterpret_cast<uint8_t *>(to);
    nb::gil_scoped_release release;
    for (int64_t a = 0; a < A; ++a)
        for (int64_t b = 0; b < B; ++b, bytes += C)
            for (int64_t c = 0; c < C; ++c)
                bytes[c] = qg_philox(static_cast<uint32_t>(a), static_cast<uint32_t>(b),
                                     static_cast<uint32_t>(c), stream, seed) < chance;
}

// Address, strides between steps and between rows, T, N, C.
using RealNumbers = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

RealInput real_input(const RealNumbers &x) {
    const auto &[address, step, row, T, N, C] = x;
    return {reinterpret_cast<const float *>(address), step, row, T, N, C};
}

Quantizer quantizer(const QuantizerTuple &q) { return quantizer_of(quantizer_numbers(q)); }

void quantize_real(const RealNumbers &x, const QuantizerTuple &q, uintptr_t codes, uintptr_t nan) {
    nb::gil_scoped_release release;
    quantize_input(real_input(x), quantizer(q), reinterpret_cast<void *>(codes),
                   reinterpret_cast<uint8_t *>(nan));
}

void mask_real(const RealNumbers &x, const QuantizerTuple &q, uintptr_t grad) {
    nb::gil_scoped_release release;
    mask_input(real_input(x), quantizer(q), reinterpret_cast<float *>(grad));
}

void requantize_codes(const RequantizerTuple &r, uintptr_t codes, int64_t count, int64_t n,
                      uintptr_t to, int64_t to_row) {
    nb::gil_scoped_release release;
    requantize(requantizer_of(r), reinterpret_cast<const void *>(codes), count, n,
               reinterpret_cast<void *>(to), to_row);
}

void mask_codes(const RequantizerTuple &r, uintptr_t codes, int64_t count, int64_t n,
                uintptr_t grad, int64_t grad_row) {
    nb::gil_scoped_release release;
    mask_requantized(requantizer_of(r), reinterpret_cast<const void *>(codes), count, n,
                     reinterpret_cast<float *>(grad), grad_row);
}

// Addresses of W, R, bw, br and of the mask of dropped codes of R; absent ones are 0.
bool write_weights(Weights &weights, uintptr_t W, uintptr_t R, uintptr_t bw, uintptr_t br,
                   uintptr_t dropped, float keep, int threads) {
    nb::gil_scoped_release release;
    auto floats = [](uintptr_t address) { return reinterpret_cast<const float *>(address); };
    return weights.write({floats(W), floats(R)}, {floats(bw), floats(br)},
                         reinterpret_cast<const uint8_t *>(dropped), keep, threads);
}

// For benchmarks: the peak rate of multiplications, and below of memory reads.
int64_t multiply(const std::string &variant, int64_t loops) {
    return variant_of(variant).multiply(loops);
}

int64_t read_memory(uintptr_t address, int64_t bytes, int64_t loops) {
    // One word of each cache line, in four independent chains.
    const auto *words = reinterpret_cast<const volatile uint64_t *>(address);
    uint64_t sum[4] = {0, 0, 0, 0};
    const int64_t lines = bytes / 256 * 4;
    for (int64_t loop = 0; loop < loops; ++loop)
        for (int64_t i = 0; i < lines; i += 4)
            for (int chain = 0; chain < 4; ++chain) sum[chain] += words[8 * (i + chain)];
    const uint64_t all = sum[0] + sum[1] + sum[2] + sum[3];
    // The result depends on the values, so that the compiler keeps the reads.
    return lines * 64 * loops + static_cast<int64_t>(all & 1);
}

}  // namespace

void bind_cpu(nb::module_ &m) {
    nb::class_<Layer>(m, "Layer")
        .def("__init__",
             [](Layer *self, const nb::dict &numbers, const std::string &variant) {
                 new (self) Layer(layer_plan(cell_numbers(numbers)), variant);
             })
        .def_prop_ro("kind", &kind)
        .def("repack", &Layer::repack, nb::call_guard<nb::gil_scoped_release>())
        .def("run", &run_layer)
        .def("backward", &run_layer_backward);
    nb::class_<Stack>(m, "Stack")
        .def("__init__", &make_stack, nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>())
        .def("run", &run_stack);
    nb::class_<Stream>(m, "Stream")
        .def(nb::init<Stack *, int64_t, std::vector<uintptr_t>>(), nb::keep_alive<1, 2>())
        .def("step", &Stream::step);
    m.def("events", &events);
    m.def("quantize", &quantize_real);
    m.def("mask", &mask_real);
    m.def("requantize", &requantize_codes);
    m.def("mask_requantized", &mask_codes);
    nb::class_<Weights>(m, "Weights")
        .def("__init__",
             [](Weights *self, const nb::dict &numbers, const std::string &variant) {
                 new (self) Weights(weights_plan(numbers), variant);
             })
        .def("write", &write_weights)
        .def("forget", &Weights::forget);
    m.def("multiply", &multiply);
    m.def("read_memory", &read_memory);
    m.def("variants", &variants, nb::arg("only_runnable") = true);
    m.def("left_out", &left_out);
    // for tests
    m.def("set_thread_price", [](double price) { thread_price = price; });
    m.def("threads_started", [] { return threads_started.load(); });
}

}  // namespace quant_gru
