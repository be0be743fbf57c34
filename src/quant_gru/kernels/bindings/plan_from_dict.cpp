#include "bindings/plan_from_dict.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
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
    if (name == "uint8") return Container::u8;
    if (name == "int16") return Container::i16;
    if (name == "int32") return Container::i32;
    if (name == "int64") return Container::i64;
    throw std::invalid_argument("Expected an integer container, got " + name);
}

Quantizer quantizer_of(const nb::dict &d) {
    Quantizer q;
    q.scale = static_cast<float>(field<double>(d, "scale"));
    const int64_t zero = field<int64_t>(d, "zero");
    q.zero = static_cast<int32_t>(zero);
    q.lo = static_cast<int32_t>(field<int64_t>(d, "lo") - zero);
    q.hi = static_cast<int32_t>(field<int64_t>(d, "hi") - zero);
    q.container = container_of(field<std::string>(d, "container"));
    return q;
}

Sum sum_of(const nb::dict &sums, const char *name) {
    Sum s;
    if (!sums.contains(name)) return s;
    const nb::dict d = field<nb::dict>(sums, name);
    const auto M = field<std::vector<int64_t>>(d, "M");
    s.present = 1;
    s.tier = field<std::string>(d, "tier")[0];
    s.k = field<int>(d, "k");
    s.lo = field<int64_t>(d, "lo");
    s.hi = field<int64_t>(d, "hi");
    for (size_t i = 0; i < M.size() && i < 2; ++i) s.M[i] = M[i];
    return s;
}

Table table_of(const nb::dict &tables, const char *name) {
    const nb::dict d = field<nb::dict>(tables, name);
    Table t;
    t.segments = field<int>(d, "segments");
    t.degree = field<int>(d, "degree");
    t.shift = field<int>(d, "shift");
    t.segment_shift = field<int>(d, "segment_shift");
    t.last = field<int64_t>(d, "last");
    t.pre_zero = field<int64_t>(d, "pre_zero");
    t.pre_lo = field<int64_t>(d, "pre_lo");
    t.pre_hi = field<int64_t>(d, "pre_hi");
    t.lo = field<int64_t>(d, "lo");
    t.hi = field<int64_t>(d, "hi");
    t.bounds = address<int64_t>(d, "bounds");
    t.coefficients = address<int64_t>(d, "coefficients");
    return t;
}

Matrix matrix_of(const nb::dict &d, int inputs) {
    Matrix m;
    m.codes = address<void>(d, "codes");
    m.kind = container_of(field<std::string>(d, "kind"));
    m.inputs = inputs;
    m.bias = address<int64_t>(d, "bias");
    m.bias_shift = field<int>(d, "bias_shift");
    m.M = address<int64_t>(d, "M");
    m.k = address<int64_t>(d, "k");
    m.lo = field<int64_t>(d, "lo");
    m.hi = field<int64_t>(d, "hi");
    m.zero = field<int64_t>(d, "zero");
    m.reach = field<int64_t>(d, "reach");
    m.weight_bits = field<int>(d, "weight_bits");
    m.operand_bits = field<int>(d, "operand_bits");
    m.operand_signed = field<bool>(d, "operand_signed");
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
    return t;
}

}  // namespace

LayerPlan layer_plan(const nb::dict &d) {
    const nb::dict sums = field<nb::dict>(d, "sums"), tables = field<nb::dict>(d, "tables");
    LayerPlan plan;
    Cell &cell = plan.cell;
    cell.H = field<int>(d, "H");
    cell.x = quantizer_of(field<nb::dict>(d, "x"));
    cell.h = quantizer_of(field<nb::dict>(d, "h"));
    cell.one = field<int64_t>(d, "one");
    cell.z_pre = sum_of(sums, "gate.z_pre");
    cell.r_pre = sum_of(sums, "gate.r_pre");
    cell.rRh = sum_of(sums, "op.rRh");
    cell.g_pre = sum_of(sums, "gate.g_pre");
    cell.old_contrib = sum_of(sums, "op.old_contrib");
    cell.new_contrib = sum_of(sums, "op.new_contrib");
    cell.h_new = sum_of(sums, "output.h");
    cell.zoneout = sum_of(sums, "zoneout");
    cell.z = table_of(tables, "gate.z_out");
    cell.r = table_of(tables, "gate.r_out");
    cell.g = table_of(tables, "gate.g_out");
    plan.W = matrix_of(field<nb::dict>(d, "W"), field<int>(d, "C"));
    plan.R = matrix_of(field<nb::dict>(d, "R"), cell.H);
    plan.narrow = field<bool>(d, "narrow");
    plan.float32 = field<bool>(d, "float32");
    plan.product = field<double>(d, "product");
    return plan;
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
