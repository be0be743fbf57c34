// The functions that an instruction set provides to the library. Included last inside its
// namespace, after its vectors, micro-kernels, `layout` and `multiply_only`.
//
// QG_LIKE names another instruction set of the build, from which this one differs only in the
// products and lanes of the fused kernel. Everything else is compiled there.

namespace {

#include "cpu/isa/rules.inl"

// This file uses rules.inl.
#include "cpu/isa/gates.inl"

// These files use gates.inl.
#include "cpu/isa/fused.inl"
#if defined(QG_TRAINING)
#include "cpu/isa/local_derivatives.inl"
#endif

#if !defined(QG_LIKE)
#include "cpu/isa/general.inl"
#include "cpu/isa/wide.inl"

#if defined(QG_TRAINING)
#include "cpu/isa/gemm.inl"
#include "cpu/isa/weights.inl"

// This file uses general.inl and local_derivatives.inl.
#include "cpu/isa/general_derivatives.inl"
#endif
#endif

#if defined(QG_AMX)
using Scope = Tiles;
#else
struct Scope {
    Scope() {}
};
#endif

}  // namespace

void prepare(const FusedPlan &plan, void *gates) { prepare_gates(plan, gates); }
bool fused(const FusedPlan &plan, const Job &job) {
    const Scope scope;
    return run_fused(plan, job);
}
int64_t multiply(int64_t loops) { return multiply_only(loops); }

#if defined(QG_TRAINING)
extern const ProductLayout product_layout{kGroup, kPanelVectors * Floats::n, kFeatures};
void fused_derivatives(const FusedPlan &plan, const DerivativesJob &job) {
    const Scope scope;
    run_fused_derivatives(plan, job);
}
int64_t fused_derivatives_workspace(const FusedPlan &plan) { return fused_derivatives_bytes(plan); }
#endif

#if defined(QG_LIKE)
bool general(const GeneralPlan &plan, const Job &job) { return QG_LIKE::general(plan, job); }
void wide_sums(const WideSums &job) { QG_LIKE::wide_sums(job); }
#if defined(QG_TRAINING)
void general_derivatives(const GeneralPlan &plan, const DerivativesJob &job) {
    QG_LIKE::general_derivatives(plan, job);
}
void wide_derivatives(const WidePlan &plan, const DerivativesJob &job) {
    QG_LIKE::wide_derivatives(plan, job);
}
int64_t general_derivatives_workspace(const GeneralPlan &plan) {
    return QG_LIKE::general_derivatives_workspace(plan);
}
int64_t wide_derivatives_workspace(const WidePlan &plan) {
    return QG_LIKE::wide_derivatives_workspace(plan);
}
void recurrence(const RecurrenceJob &job) { QG_LIKE::recurrence(job); }
void weight_products(const WeightJob &job) { QG_LIKE::weight_products(job); }
bool scales(const WeightRows &w, int64_t first, int64_t end, double *found, float *space) {
    return QG_LIKE::scales(w, first, end, found, space);
}
double codes(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped, void *to,
             float *space) {
    return QG_LIKE::codes(w, row, scale, dropped, to, space);
}
#endif
#else
bool general(const GeneralPlan &plan, const Job &job) { return run_general(plan, job); }
void wide_sums(const WideSums &job) { run_wide_sums(job); }
#if defined(QG_TRAINING)
void general_derivatives(const GeneralPlan &plan, const DerivativesJob &job) {
    run_general_derivatives(plan, job);
}
void wide_derivatives(const WidePlan &plan, const DerivativesJob &job) {
    run_wide_derivatives(plan, job);
}
int64_t general_derivatives_workspace(const GeneralPlan &plan) {
    return general_derivatives_bytes(plan);
}
int64_t wide_derivatives_workspace(const WidePlan &plan) { return wide_derivatives_bytes(plan); }
void recurrence(const RecurrenceJob &job) { recurrence_rows(job); }
void weight_products(const WeightJob &job) { weight_sums(job); }
QG_WEIGHTS
#endif
#endif
