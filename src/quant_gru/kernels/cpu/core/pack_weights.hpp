// Weights in the layouts of the kernels.
#pragma once

#include "cpu/core/memory.hpp"
#include "cpu/core/plan.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {

// Which arithmetic is exact for all weights that have been packed.
struct Exactness {
    bool in_float = true;   // float32
    bool in_double = true;  // float64 without fused multiply-add
    bool powers = true;     // the lanes of `Powers`
};

// Whether a multiplier, and its product with a sum, is far from the limits of float32.
bool fits_float(double m);

// Whether it is a power of two.
bool is_power(double m);

// Lays weights out for the fused kernel, and narrows what is exact. Returns whether weights and
// sums fit that kernel.
bool pack_fused(const Matrix &from, int H, const Layout &layout, Arena &arena, Packed &p,
                Exactness &exact);

// Lays weights out for the general kernel. Returns the largest |sum|.
int64_t pack_general(const Matrix &from, int H, const Quantizer &operand, Arena &arena,
                     Projection &p);

// Copies weights for the kernel of any widths.
void copy_wide(const Matrix &from, int H, Arena &arena, WideProjection &p);

// Tables in the forms that kernels read fast.

// Copies the segments of a table whose bounds and coefficients belong to the caller.
void copy_segments(Table &t, Arena &arena);

// Adds entries, bytes or words: the outputs of all input codes. `pre` is the sum that is looked up.
void tabulate(Table &t, const Sum &pre, Arena &arena);

}  // namespace quant_gru
