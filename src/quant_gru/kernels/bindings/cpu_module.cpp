#include "bindings/cpu_module.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/cpu_calls.hpp"
#include "bindings/plan_from_dict.hpp"
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

// The keys of `d` are the names of the fields of CellWeights and Scales.
CellWeights cell_weights(const nb::dict &d) {
    auto address = [&](const char *name) {
        return reinterpret_cast<void *>(nb::cast<uintptr_t>(d[name]));
    };
    auto scale = [&](const char *name) { return nb::cast<double>(d[name]); };
    CellWeights w;
    w.W = address("W");
    w.R = address("R");
    w.W_bytes = nb::cast<int>(d["W_bytes"]);
    w.R_bytes = nb::cast<int>(d["R_bytes"]);
    w.W_scales = static_cast<const float *>(address("W_scales"));
    w.R_scales = static_cast<const float *>(address("R_scales"));
    w.scales = {scale("s_x"), scale("s_h"), scale("s_Rh"),
                scale("s_z"), scale("s_r"), scale("s_g")};
    return w;
}

// The keys of `d` are the names of the fields of BackwardCall.
void run_layer_backward(const Layer &layer, const nb::dict &d) {
    auto number = [&](const char *name) { return nb::cast<int64_t>(d[name]); };
    auto address = [&](const char *name) {
        return reinterpret_cast<void *>(nb::cast<uintptr_t>(d[name]));
    };
    auto real = [&](const char *name) { return static_cast<float *>(address(name)); };
    BackwardCall call;
    static_cast<CellWeights &>(call) = cell_weights(d);
    call.x = address("x");
    call.h0 = address("h0");
    call.out = address("out");
    call.held = static_cast<const uint8_t *>(address("held"));
    call.lengths = static_cast<const int64_t *>(address("lengths"));
    call.T = number("T");
    call.N = number("N");
    call.reverse = nb::cast<bool>(d["reverse"]);
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

// Shift and multiplier, quantizers of the codes below and above, rule of rounding.
using RequantizerTuple = std::tuple<int64_t, int64_t, QuantizerTuple, QuantizerTuple, int>;

Requantizer requantizer_of(const RequantizerTuple &r) {
    const auto &[k, M, below, above, rule] = r;
    return requantizer({1, k, {M, 0}}, quantizer_numbers(below), quantizer_numbers(above), rule);
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

// The updates of all cells of a plan from weights in float32 that stay at their addresses.
class LiveUpdate {
 public:
    // The native weights of a cell, a dict whose values are all layers made of them, and addresses
    // of W, R, bw and br.
    using Cell = std::tuple<nb::object, nb::dict, std::array<uintptr_t, 4>>;
    explicit LiveUpdate(std::vector<Cell> cells) : cells_(std::move(cells)) {}

    // Rewrites the numbers whose weights changed. Returns whether there are any.
    bool run(int threads) const {
        bool changed = false;
        for (const auto &[weights, layers, at] : cells_)
            if (write_weights(*nb::cast<Weights *>(weights), at[0], at[1], at[2], at[3], 0, 1.f,
                              threads)) {
                changed = true;
                for (nb::handle layer : layers.values()) {
                    Layer &one = *nb::cast<Layer *>(layer);
                    nb::gil_scoped_release release;
                    one.repack();
                }
            }
        return changed;
    }

 private:
    std::vector<Cell> cells_;
};

void make_backward(CPUBackward *self, CPUCalls &calls, const std::vector<nb::dict> &cells,
                   nb::object keep) {
    std::vector<CellWeights> weights;
    for (const nb::dict &cell : cells) weights.push_back(cell_weights(cell));
    new (self) CPUBackward(calls, std::move(weights), std::move(keep));
}

nb::object run_stack_backward(CPUBackward &self, const nb::object &x, const nb::object &h0,
                              const nb::object &outs, const nb::object &nan,
                              const nb::object &grad_y, const nb::object &grad_last,
                              const nb::tuple &wanted, const nb::object &packing,
                              const nb::object &dtype) {
    return self.run({x, h0, outs, nan, grad_y, grad_last, wanted, packing, dtype});
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
        .def("__init__", &make_stack, nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>());
    nb::class_<CPUCalls>(m, "CPUCalls")
        .def(nb::init<Stack &, const char *, const nb::tuple &, const nb::tuple &, nb::object>(),
             nb::keep_alive<1, 2>())
        .def("is_chosen", &CPUCalls::is_chosen)
        .def("run", &CPUCalls::run_tensors, nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg(), nb::arg());
    nb::class_<CPUBackward>(m, "CPUBackward")
        .def("__init__", &make_backward, nb::keep_alive<1, 2>())
        .def("run", &run_stack_backward, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg());
    bind_stream(m);
    nb::class_<LiveUpdate>(m, "LiveUpdate")
        .def(nb::init<std::vector<LiveUpdate::Cell>>())
        .def("run", &LiveUpdate::run);
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
