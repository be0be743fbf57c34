#include "plan/cell_plan.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/core/cell_numbers.hpp"
#include "plan/tables.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int kZoneoutShift = 15;
constexpr double kLargestOne = 0x1p40;

// Derives the sums of one cell.
class Sums {
 public:
    Sums(const CellParameters &cell, FrozenNumbers &to) : cell_(cell), to_(to) {}

    SumTerm code(Operator op) const {
        const ActivationQuantizer &q = cell_.quantizer(op);
        return {q.scale, static_cast<unsigned __int128>(q.max_abs())};
    }

    // The code of a product, or the product itself if it is fused. The scale is in `ratio`.
    SumTerm product(Operator op, const SumTerm &a, const SumTerm &b, int width) {
        const SumTerm whole{a.ratio * b.ratio, a.bound * b.bound};
        if (!cell_.config[op].bitwidth) return whole;
        to_.sums.emplace_back(
            op, one_term(whole.ratio / cell_.quantizer(op).scale, significant_bits(width)));
        return code(op);
    }

    void add(Operator op, SumTerm a, SumTerm b) {
        const ActivationQuantizer &out = cell_.quantizer(op);
        a.ratio = a.ratio / out.scale;
        b.ratio = b.ratio / out.scale;
        to_.sums.emplace_back(
            op, several_terms({a, b}, out.bits, cell_.config.scale_kind == ScaleKind::pot));
    }

 private:
    const CellParameters &cell_;
    FrozenNumbers &to_;
};

// The quantizer of an output of sigmoid or tanh, from the range of the function.
ActivationQuantizer fixed_range_quantizer(Operator op, const OperatorConfig &config,
                                          ScaleKind kind) {
    const bool tanh = op == Operator::g_out, is_signed = !config.is_unsigned;
    const bool halved = tanh || (is_signed && config.is_symmetric);
    const int n = halved ? config.bitwidth - 1 : config.bitwidth;
    const double levels = std::ldexp(1.0, n);
    const double scale = kind == ScaleKind::pot ? 1.0 / levels : 1.0 / std::max(levels - 1, 1.0);
    int64_t zero = 0;
    if (!config.is_symmetric && tanh && !is_signed) zero = int64_t{1} << (config.bitwidth - 1);
    if (!config.is_symmetric && !tanh && is_signed) zero = -(int64_t{1} << (config.bitwidth - 1));
    return {config.bitwidth, is_signed, static_cast<double>(static_cast<float>(scale)), zero};
}

}  // namespace

int64_t ActivationQuantizer::max_abs() const {
    const int64_t zero = inner_zero_point();
    return std::max(std::abs(lo() - zero), std::abs(hi() - zero));
}

const ActivationTable &CellParameters::table(Operator op) const {
    return tables[op == Operator::z_out ? 0 : op == Operator::r_out ? 1 : 2];
}

FrozenNumbers frozen_numbers(const CellParameters &cell, double zoneout) {
    FrozenNumbers found;
    const ActivationQuantizer &z = cell.quantizer(Operator::z_out);
    const double one = std::rint(1.0 / z.scale);
    if (one > kLargestOne)
        throw ArgumentError("Expected scale to be at least 2^-40, got " + std::to_string(z.scale) +
                            " (operator 'gate.z_out')");
    found.one = static_cast<int64_t>(one);
    Sums sums(cell, found);
    const auto bits = [&cell](Operator op) { return cell.quantizer(op).bits; };
    const SumTerm Wx = sums.code(Operator::Wx), Rh = sums.code(Operator::Rh);
    const SumTerm h = sums.code(Operator::h), g = sums.code(Operator::g_out);
    const SumTerm update = sums.code(Operator::z_out), reset = sums.code(Operator::r_out);
    const int64_t largest = std::max(std::abs(found.one - (z.lo() - z.zero_point)),
                                     std::abs(found.one - (z.hi() - z.zero_point)));
    sums.add(Operator::z_pre, Wx, Rh);
    sums.add(Operator::r_pre, Wx, Rh);
    sums.add(Operator::g_pre, Wx,
             sums.product(Operator::rRh, reset, Rh, bits(Operator::r_out) + bits(Operator::Rh)));
    const SumTerm old = sums.product(Operator::old_contrib, update, h, z.bits + bits(Operator::h));
    const SumTerm fresh =
        sums.product(Operator::new_contrib, {z.scale, static_cast<unsigned __int128>(largest)}, g,
                     z.bits + bits(Operator::g_out));
    sums.add(Operator::h, old, fresh);
    const auto kept = static_cast<int64_t>(std::rint(zoneout * (1 << kZoneoutShift)));
    if (kept) found.zoneout = Multipliers{{kept, (1 << kZoneoutShift) - kept}, kZoneoutShift};
    return found;
}

void set_fixed_ranges(CellParameters &cell) {
    for (Operator op : {Operator::z_out, Operator::r_out, Operator::g_out})
        cell.quantizers[static_cast<size_t>(op)] =
            fixed_range_quantizer(op, cell.config[op], cell.config.scale_kind);
}

void build_tables(CellParameters &cell) {
    const std::pair<Operator, Operator> tables[] = {{Operator::z_out, Operator::z_pre},
                                                    {Operator::r_out, Operator::r_pre},
                                                    {Operator::g_out, Operator::g_pre}};
    for (size_t i = 0; i < 3; ++i) {
        const auto [out, pre] = tables[i];
        cell.tables[i] =
            build_table(out, cell.quantizer(pre), cell.quantizer(out), cell.config.activation,
                        cell.config.segments, cell.config.rounding);
    }
}

}  // namespace quant_gru
