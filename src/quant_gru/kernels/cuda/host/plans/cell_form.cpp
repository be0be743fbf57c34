#include "cuda/host/plans/cell_form.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace quant_gru::cuda {
namespace {

int64_t one_minus_z(const CellNumbers &n) {
    const int64_t low = n.one - (n.z.lo() - n.z.zero), high = n.one - (n.z.hi() - n.z.zero);
    return std::max(std::llabs(low), std::llabs(high));
}

bool fits_float(const SumNumbers &sum) {
    for (int i = 0; i < sum.terms; ++i) {
        const double m = std::ldexp(static_cast<double>(sum.M[i]), static_cast<int>(-sum.k));
        if (!is_normal(m)) return false;
    }
    return true;
}

// Whether adding the magic number of float32 to a sum of two terms gives a positive number. The
// bits of positive numbers are ordered as integers.
bool below_magic(const SumNumbers &sum, double first, double second) {
    const double most =
        static_cast<double>(sum.M[0]) * first + static_cast<double>(sum.M[1]) * second;
    return std::ldexp(most, static_cast<int>(-sum.k)) < kMagicFloat;
}

bool is_power(const SumNumbers &sum) { return (sum.M[0] & (sum.M[0] - 1)) == 0; }

// The fastest mode for a gate's tables if directions agree, else global memory.
int mode_of(const std::vector<const GateTables *> &several, size_t gate, bool in_float, bool near) {
    const auto alike = [&](int GateTable::*mode) {
        return std::all_of(several.begin(), several.end(), [&](const GateTables *each) {
            return (*each)[gate].*mode == several[0]->at(gate).*mode;
        });
    };
    int mode = kDirectGlobal;
    if (near && alike(&GateTable::near))
        mode = several[0]->at(gate).near;
    else if (alike(&GateTable::mode))
        mode = several[0]->at(gate).mode;
    return mode == kQuadratic && in_float ? kDirectGlobal : mode;
}

// The gate arithmetic of a launch. `near`: whether the GPU has large shared memory.
Gates gates_of(const std::vector<const GateTables *> &several, bool in_float, bool near) {
    Gates gates;
    gates.in_float = in_float;
    for (size_t i = 0; i < 3; ++i) gates.tables[i] = mode_of(several, i, in_float, near);
    for (const GateTables *each : several) {
        int bytes = 0;
        for (size_t i = 0; i < 3; ++i) bytes += (*each)[i].shared_bytes(gates.tables[i]);
        gates.table_bytes = std::max(gates.table_bytes, bytes);
    }
    return gates;
}

bool has(const Gates &gates, TableMode mode) {
    return std::count(gates.tables.begin(), gates.tables.end(), mode) > 0;
}

bool reads_only_near(const Gates &gates) {
    return !has(gates, kDirectGlobal) && !has(gates, kQuadratic);
}

}  // namespace

Macros Rules::macros() const {
    Macros found;
    if (sums != QG_HALF_EVEN) found["QG_RULE"] = std::to_string(sums);
    if (input != QG_HALF_EVEN) found["QG_INPUT_RULE"] = std::to_string(input);
    return found;
}

Macros plain_of(const CellNumbers &numbers) {
    Macros found = rules_of(numbers).macros();
    found.insert(kPlain.begin(), kPlain.end());
    return found;
}

Macros Form::products() const {
    Macros found = rules.macros();
    found["QG_RRH"] = std::to_string(rRh);
    found["QG_OLD"] = std::to_string(old_contrib);
    found["QG_NEW"] = std::to_string(new_contrib);
    found["QG_ZONEOUT"] = std::to_string(zoneout);
    return found;
}

Form form_of(const CellNumbers &n, const GateTables &tables, bool saturates, bool large_shared) {
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
    const auto Wx = static_cast<double>(n.Wx.reach()), Rh = static_cast<double>(n.Rh.reach());
    const double rest = n.rRh.present() ? static_cast<double>(n.rRh.reach()) : plan.product;
    const bool all_fit = std::all_of(sums.begin(), sums.end(),
                                     [](const SumNumbers *sum) { return fits_float(*sum); }) &&
                         below_magic(n.sums.z_pre, Wx, Rh) && below_magic(n.sums.r_pre, Wx, Rh) &&
                         below_magic(n.sums.g_pre, Wx, rest);
    form.rules = rules_of(n);
    form.narrow = plan.narrow && n.rounding != QG_DOUBLE;
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
    form.gates = gates_of({&tables}, in_float, false);
    const Gates near = gates_of({&tables}, true, true);
    const bool in_int32 = form.narrow && !in_float && form.weight_bytes == 1 &&
                          form.state_bytes == 2 && one_minus_z(n) < 1 << 24 &&
                          reads_only_near(near) && all_a && all_fit && form.powers;
    if (form.narrow && large_shared && (in_int32 || has(near, kCompressed)))
        form.own = gates_of({&tables}, in_int32 || in_float, true);
    form.saturated =
        in_float && !form.own && saturates && form.gates.tables == Modes{kDirect, kDirect, kDirect};
    return form;
}

std::optional<Form> joint_form(const std::vector<DirectionForm> &directions) {
    Form joint = directions[0].form;
    const auto all = [&](auto rule) {
        return std::all_of(directions.begin(), directions.end(), rule);
    };
    if (all([&](const DirectionForm &d) { return d.form == joint; })) return joint;
    if (!joint.narrow || !all([&](const auto &d) { return d.form.has_structure_of(joint); }))
        return std::nullopt;
    std::vector<const GateTables *> tables;
    bool words = false;
    for (const DirectionForm &each : directions) {
        tables.push_back(&each.tables);
        words = words || each.form.words;
    }
    const bool in_float = all([](const DirectionForm &d) { return d.form.gates.in_float; });
    joint.own.reset();
    if (all([](const DirectionForm &d) { return d.form.own.has_value(); })) {
        Gates own = gates_of(tables, in_float, true);
        if (all([](const DirectionForm &d) { return d.form.in_int32(); }) && reads_only_near(own))
            own.in_float = true;
        if (own.in_float != in_float || has(own, kCompressed)) joint.own = own;
    }
    joint.gates = gates_of(tables, in_float, false);
    joint.words = words;
    joint.saturated = all([](const DirectionForm &d) { return d.form.saturated; });
    joint.powers = all([](const DirectionForm &d) { return d.form.powers; });
    return joint;
}

}  // namespace quant_gru::cuda
