#include "cuda/host/cell_form.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/host/gate_tables.hpp"

namespace quant_gru::cuda {
namespace {

constexpr double kSmallest = 1e-20, kLargest = 1e20;  // products stay normal in float32

int64_t one_minus_z(const CellNumbers &n) {
    const int64_t low = n.one - (n.z.lo() - n.z.zero), high = n.one - (n.z.hi() - n.z.zero);
    return std::max(std::llabs(low), std::llabs(high));
}

bool fits_float(const SumNumbers &sum) {
    for (int i = 0; i < sum.terms; ++i) {
        const double m = std::ldexp(static_cast<double>(sum.M[i]), static_cast<int>(-sum.k));
        if (m != 0 && !(kSmallest < m && m < kLargest)) return false;
    }
    return true;
}

bool is_power(const SumNumbers &sum) { return (sum.M[0] & (sum.M[0] - 1)) == 0; }

Gates gates_of(const std::array<GateTable, 3> &tables, bool in_float, bool near) {
    Gates gates;
    gates.in_float = in_float;
    for (size_t i = 0; i < 3; ++i) {
        const int mode = near ? tables[i].near : tables[i].mode;
        gates.tables[i] = mode == kQuadratic && in_float ? kDirectGlobal : mode;
        gates.table_bytes += tables[i].shared_bytes(gates.tables[i]);
    }
    return gates;
}

}  // namespace

Form form_of(const CellNumbers &n, const std::array<GateTable, 3> &tables, bool saturates,
             bool large_shared) {
    const LayerPlan plan = layer_plan(n);
    bool all_a = true;
    Form form;
    for (const Sum *sum : {&plan.cell.z_pre, &plan.cell.r_pre, &plan.cell.g_pre, &plan.cell.h_new,
                           &plan.cell.zoneout})
        if (sum->present) {
            all_a = all_a && sum->tier == 'a';
            form.words = form.words || sum->tier == 'd';
        }
    std::vector<const SumNumbers *> sums{&n.sums.z_pre, &n.sums.r_pre, &n.sums.g_pre, &n.sums.h};
    form.powers = true;
    for (const SumNumbers *sum : {&n.sums.rRh, &n.sums.old_contrib, &n.sums.new_contrib})
        if (sum->terms) {
            sums.push_back(sum);
            form.powers = form.powers && is_power(*sum);
        }
    const bool all_fit = std::all_of(sums.begin(), sums.end(),
                                     [](const SumNumbers *sum) { return fits_float(*sum); });
    form.narrow = plan.narrow;
    form.weight_bytes = planes_of(n.R.weight_bits);
    form.state_bytes = planes_of(n.h.bits);
    form.wide_input = n.Wx.bits > 8;
    form.out_bytes = container_bytes(n.h.container());
    form.rRh = n.sums.rRh.terms > 0;
    form.old_contrib = n.sums.old_contrib.terms > 0;
    form.new_contrib = n.sums.new_contrib.terms > 0;
    form.zoneout = n.sums.zoneout.terms > 0;
    const bool in_float = form.narrow && form.weight_bytes == 1 && form.state_bytes == 1 && all_a &&
                          plan.product < 16777216.0 && all_fit;
    const auto has = [&](auto rule) { return std::any_of(tables.begin(), tables.end(), rule); };
    const bool compressed = has([](const GateTable &t) { return t.near == kCompressed; });
    const bool direct =
        !has([](const GateTable &t) { return t.near != kDirect && t.near != kCompressed; });
    form.in_int32 = form.narrow && !in_float && form.weight_bytes == 1 && form.state_bytes == 2 &&
                    one_minus_z(n) < 1 << 24 && direct && all_a && all_fit && form.powers &&
                    large_shared;
    form.own = form.narrow && (form.in_int32 || compressed) && large_shared;
    form.gates = gates_of(tables, form.in_int32 || in_float, form.own);
    form.saturated =
        in_float && !form.own && saturates && form.gates.tables == Modes{kDirect, kDirect, kDirect};
    return form;
}

}  // namespace quant_gru::cuda
