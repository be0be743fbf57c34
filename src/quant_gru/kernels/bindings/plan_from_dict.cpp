#include "bindings/plan_from_dict.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace quant_gru {
namespace {

template <class T>
T field(const nb::dict &d, const char *name) {
    return nb::cast<T>(d[name]);
}

template <class T>
T *address(const nb::dict &d, const char *name) {
    return reinterpret_cast<T *>(field<uintptr_t>(d, name));
}

Container container_of(const std::string &name) {
    if (name == "int8") return Container::i8;
    if (name == "int16") return Container::i16;
    if (name == "int32") return Container::i32;
    throw std::invalid_argument("Expected int8, int16 or int32, got " + name);
}

// Operators that are fused have no quantizer.
QuantizerNumbers quantizer_of(const nb::dict &quantizers, const char *name) {
    if (!quantizers.contains(name)) return {};
    return quantizer_numbers(field<QuantizerTuple>(quantizers, name));
}

SumNumbers sum_of(const nb::dict &sums, const char *name) {
    SumNumbers s;
    if (!sums.contains(name)) return s;
    const auto [k, M] = field<std::pair<int64_t, std::vector<int64_t>>>(sums, name);
    s.terms = static_cast<int>(M.size());
    s.k = k;
    for (size_t i = 0; i < M.size() && i < 2; ++i) s.M[i] = M[i];
    return s;
}

TableNumbers table_of(const nb::dict &tables, const char *name) {
    const nb::dict d = field<nb::dict>(tables, name);
    TableNumbers t;
    t.segments = field<int64_t>(d, "segments");
    t.degree = field<int>(d, "degree");
    t.shift = field<int>(d, "shift");
    t.segment_shift = field<int>(d, "segment_shift");
    t.last = field<int64_t>(d, "last");
    t.zero = field<int64_t>(d, "zero");
    t.lo = field<int64_t>(d, "lo");
    t.hi = field<int64_t>(d, "hi");
    t.bounds = address<int64_t>(d, "bounds");
    t.coefficients = address<int64_t>(d, "coefficients");
    return t;
}

MatrixNumbers matrix_of(const nb::dict &d, int inputs) {
    MatrixNumbers m;
    m.inputs = inputs;
    m.weight_bits = field<int>(d, "bits");
    m.codes = address<void>(d, "codes");
    m.kind = container_of(field<std::string>(d, "kind"));
    m.bias = address<int64_t>(d, "bias");
    m.M = address<int64_t>(d, "M");
    m.k = address<int64_t>(d, "k");
    return m;
}

WeightTarget target_of(const nb::dict &d) {
    WeightTarget t;
    t.n = field<int64_t>(d, "n");
    t.bits = field<int>(d, "bits");
    t.b_bits = field<int>(d, "b_bits");
    t.codes = address<void>(d, "codes");
    t.b_codes = address<void>(d, "b_codes");
    t.b_bytes = field<int>(d, "b_bytes");
    t.scales = address<float>(d, "scales");
    t.b_scales = address<float>(d, "b_scales");
    t.B = address<int64_t>(d, "B");
    t.M = address<int64_t>(d, "M");
    t.k = address<int64_t>(d, "k");
    t.operand_scale = field<double>(d, "operand_scale");
    t.result_scale = field<double>(d, "result_scale");
    t.b_unit = field<double>(d, "b_unit");
    t.limit = field<double>(d, "limit");
    t.significant = field<int>(d, "significant");
    t.factors = address<const double>(d, "factors");
    t.term_limit = field<double>(d, "term_limit");
    t.unit_exponent = field<int>(d, "unit_exponent");
    return t;
}

}  // namespace

QuantizerNumbers quantizer_numbers(const QuantizerTuple &tuple) {
    const auto &[bits, is_signed, scale, zero] = tuple;
    return {bits, is_signed, static_cast<float>(scale), zero};
}

CellNumbers gate_part(const nb::dict &d) {
    const nb::dict quantizers = field<nb::dict>(d, "quantizers");
    const nb::dict sums = field<nb::dict>(d, "sums"), tables = field<nb::dict>(d, "tables");
    CellNumbers n;
    n.one = field<int64_t>(d, "one");
    n.rounding = field<int>(d, "rounding");
    n.rounding_input = field<int>(d, "rounding_input");
    n.x = quantizer_of(quantizers, "input.x");
    n.h = quantizer_of(quantizers, "output.h");
    n.Wx = quantizer_of(quantizers, "matmul.Wx");
    n.Rh = quantizer_of(quantizers, "matmul.Rh");
    n.z_pre = quantizer_of(quantizers, "gate.z_pre");
    n.r_pre = quantizer_of(quantizers, "gate.r_pre");
    n.g_pre = quantizer_of(quantizers, "gate.g_pre");
    n.z = quantizer_of(quantizers, "gate.z_out");
    n.r = quantizer_of(quantizers, "gate.r_out");
    n.g = quantizer_of(quantizers, "gate.g_out");
    n.rRh = quantizer_of(quantizers, "op.rRh");
    n.old_contrib = quantizer_of(quantizers, "op.old_contrib");
    n.new_contrib = quantizer_of(quantizers, "op.new_contrib");
    n.sums.z_pre = sum_of(sums, "gate.z_pre");
    n.sums.r_pre = sum_of(sums, "gate.r_pre");
    n.sums.g_pre = sum_of(sums, "gate.g_pre");
    n.sums.rRh = sum_of(sums, "op.rRh");
    n.sums.old_contrib = sum_of(sums, "op.old_contrib");
    n.sums.new_contrib = sum_of(sums, "op.new_contrib");
    n.sums.h = sum_of(sums, "output.h");
    n.sums.zoneout = sum_of(sums, "zoneout");
    n.tables.z = table_of(tables, "gate.z_out");
    n.tables.r = table_of(tables, "gate.r_out");
    n.tables.g = table_of(tables, "gate.g_out");
    return n;
}

CellNumbers cell_numbers(const nb::dict &d) {
    CellNumbers n = gate_part(d);
    n.H = field<int>(d, "H");
    n.W = matrix_of(field<nb::dict>(d, "W"), field<int>(d, "C"));
    n.R = matrix_of(field<nb::dict>(d, "R"), n.H);
    return n;
}

WeightsPlan weights_plan(const nb::dict &d) {
    WeightsPlan plan;
    plan.H = field<int>(d, "H");
    plan.free_scale = field<bool>(d, "free");
    plan.finite = address<bool>(d, "finite");
    plan.targets = {target_of(field<nb::dict>(d, "W")), target_of(field<nb::dict>(d, "R"))};
    return plan;
}

}  // namespace quant_gru
