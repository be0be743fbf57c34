// Weights in the layouts of the kernels.
#pragma once

#include "cpu/core/memory.hpp"
#include "cpu/core/plan.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {

// Which arithmetic is exact for all weights packed so far.
struct Exactness {
    bool in_float = true;   // float32
    bool in_double = true;  // float64 without fused multiply-add
    bool powers = true;     // lanes of `Powers`
    // Whether stretched multipliers move nothing but ties, in lanes of float32 and of float64.
    bool stretched_float = true, stretched_double = true;
};

// Whether a stretched M moves only ties among all v * M / 2^k, |v| <= bound.
bool stretches_float(double bound, int64_t M);
bool stretches_double(double bound, int64_t M);

// Whether m, and its product with any sum, is far from the limits of float32.
bool fits_float(double m);

// Whether m is a power of two.
bool is_power(double m);

// Lays weights out for the fused kernel. Clears flags of `exact` that do not apply to them. Returns
// whether weights and sums fit that kernel.
bool pack_fused(const Matrix &from, int H, const Layout &layout, Arena &arena, Packed &p,
                Exactness &exact);

// Lays weights out for the general kernel. Returns the largest |sum|. Clears `stretched` if it does
// not apply to them.
int64_t pack_general(const Matrix &from, int H, const Quantizer &operand, Arena &arena,
                     Projection &p, bool &stretched);

// Copies weights for the wide kernel.
void copy_wide(const Matrix &from, int H, Arena &arena, WideProjection &p);

// Copies the segments of a table, because bounds and coefficients belong to the caller.
void copy_segments(Table &t, Arena &arena);

// Tabulates the outputs of all input codes as entries, bytes or words. `pre` is the sum whose
// result is looked up.
void tabulate(Table &t, const Sum &pre, Arena &arena);

}  // namespace quant_gru
