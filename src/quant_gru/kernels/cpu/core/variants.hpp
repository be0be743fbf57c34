// The instruction sets of this build, and which of them this machine supports.
#pragma once

#include <string>
#include <vector>

#include "cpu/core/training.hpp"

namespace quant_gru {

struct Variant {
    const char *name;
    bool (*runs_here)();
    const Layout *layout;
    // Computes FusedPlan::gates, after everything else of the plan and of the object it is in. The
    // plan must stay where it is.
    void (*prepare)(const FusedPlan &, void *);
    bool (*fused)(const FusedPlan &, const Job &);
    bool (*general)(const GeneralPlan &, const Job &);
    int64_t (*multiply)(int64_t);
    MultiplyWide wide_sums;
#if defined(QG_TRAINING)
    bool (*scales)(const WeightRows &, int64_t, int64_t, double *, float *);
    double (*codes)(const WeightRows &, int64_t, float, const uint8_t *, void *, float *);
    const ProductLayout *product_layout;
    void (*fused_derivatives)(const FusedPlan &, const DerivativesJob &);
    void (*general_derivatives)(const GeneralPlan &, const DerivativesJob &);
    void (*wide_derivatives)(const WidePlan &, const DerivativesJob &);
    int64_t (*fused_derivatives_workspace)(const FusedPlan &);
    int64_t (*general_derivatives_workspace)(const GeneralPlan &);
    int64_t (*wide_derivatives_workspace)(const WidePlan &);
    void (*recurrence)(const RecurrenceJob &);
    void (*weight_products)(const WeightJob &);
#endif
};

// Names of instruction sets, fastest first.
std::vector<std::string> variants(bool only_runnable);

// Names of instruction sets of this architecture that the compiler could not build.
std::vector<std::string> left_out();

// Throws std::invalid_argument if this machine does not support `name`.
const Variant &variant_of(const std::string &name);

}  // namespace quant_gru
