#include "cuda/host/plans/gate_numbers.hpp"

#include <algorithm>
#include <cmath>

namespace quant_gru::cuda {
namespace {

constexpr double kMagicDouble = 6755399441055744.0;

template <class Real>
SumC<Real> sum_of(const SumNumbers &n, const Sum &sum) {
    SumC<Real> c{};
    if (!n.terms) return c;
    const double magic = sizeof(Real) == 4 ? kMagicFloat : kMagicDouble;
    for (int i = 0; i < n.terms; ++i) {
        c.M[i] = n.M[i];
        c.m[i] = static_cast<Real>(std::ldexp(static_cast<double>(n.M[i]), static_cast<int>(-n.k)));
    }
    c.lo = static_cast<Real>(magic + static_cast<double>(sum.lo));
    c.hi = static_cast<Real>(magic + static_cast<double>(sum.hi));
    c.low = sum.lo;
    c.high = sum.hi;
    c.k = n.k;
    c.in_words = sum.tier == 'd';
    return c;
}

TableC table_of(const GateNumbers &gates, size_t gate, const TableAddresses &place) {
    const GateTable &of = gates.tables[gate];
    const TableNumbers &t = gates.table(gate);
    const QuantizerNumbers &pre = gates.pre(gate);
    TableC c{};
    c.direct = place.direct;
    c.bounds = place.bounds;
    c.coefficients = place.coefficients;
    c.entries = static_cast<int64_t>(of.direct.size());
    if (!of.lines.empty()) {
        c.lines = place.lines;
        c.line_count = static_cast<int64_t>(of.lines.size() / 2);
        c.line_origin = of.line_origin;
    }
    c.pre_lo = of.first + pre.zero;
    c.pre_zero = pre.zero;
    c.least = pre.lo();
    c.segments = t.segments;
    c.degree = t.degree;
    c.shift = t.shift;
    c.last = t.last;
    c.segment_shift = std::max(t.segment_shift, 0);
    c.lo = t.lo - t.zero;
    c.hi = t.hi - t.zero;
    c.scale = std::ldexp(1.0, -t.shift);
    return c;
}

}  // namespace

GateNumbers::GateNumbers(const CellNumbers &numbers_)
    : numbers(numbers_), saturated(saturated_numbers(numbers_)) {
    for (size_t i = 0; i < 3; ++i) tables[i] = gate_table(table(i), pre(i), numbers.rounding);
}

const TableNumbers &GateNumbers::table(size_t gate) const {
    return gate == 0 ? numbers.tables.z : gate == 1 ? numbers.tables.r : numbers.tables.g;
}

const QuantizerNumbers &GateNumbers::pre(size_t gate) const {
    return gate == 0 ? numbers.z_pre : gate == 1 ? numbers.r_pre : numbers.g_pre;
}

template <class Real>
CellC<Real> GateNumbers::cell(const std::array<TableAddresses, 3> &places) const {
    const double magic = sizeof(Real) == 4 ? kMagicFloat : kMagicDouble;
    const CellNumbers &n = numbers;
    const quant_gru::Cell plan = layer_plan(n).cell;
    CellC<Real> c{};
    c.z_pre = sum_of<Real>(n.sums.z_pre, plan.z_pre);
    c.r_pre = sum_of<Real>(n.sums.r_pre, plan.r_pre);
    c.rRh = sum_of<Real>(n.sums.rRh, plan.rRh);
    c.g_pre = sum_of<Real>(n.sums.g_pre, plan.g_pre);
    c.old_contrib = sum_of<Real>(n.sums.old_contrib, plan.old_contrib);
    c.new_contrib = sum_of<Real>(n.sums.new_contrib, plan.new_contrib);
    c.h = sum_of<Real>(n.sums.h, plan.h_new);
    c.zoneout = sum_of<Real>(n.sums.zoneout, plan.zoneout);
    c.z = table_of(*this, 0, places[0]);
    c.r = table_of(*this, 1, places[1]);
    c.g = table_of(*this, 2, places[2]);
    c.one = static_cast<Real>(n.one);
    c.one_integer = n.one;
    c.Rh_lo = static_cast<Real>(magic + static_cast<double>(n.Rh.lo() - n.Rh.zero));
    c.Rh_hi = static_cast<Real>(magic + static_cast<double>(n.Rh.hi() - n.Rh.zero));
    c.Wx_offset = static_cast<Real>(n.Wx.zero - n.Wx.lo());
    c.h_zero = n.h.zero;
    c.h_offset = byte_offset(n.h);
    return c;
}

template CellC<float> GateNumbers::cell(const std::array<TableAddresses, 3> &) const;
template CellC<double> GateNumbers::cell(const std::array<TableAddresses, 3> &) const;

}  // namespace quant_gru::cuda
