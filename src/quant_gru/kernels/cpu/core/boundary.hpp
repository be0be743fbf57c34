// Quantize, requantize and clamp masks of the inputs of a backward.
#pragma once

#include <cstdint>

#include "cpu/core/plan.hpp"

namespace quant_gru {

// Real values (T, N, C) with contiguous features.
struct RealInput {
    const float *values = nullptr;
    int64_t step = 0, row = 0, T = 0, N = 0, C = 0;
};

// Writes codes (T, N, C) in b.container, and nan (T, N): whether the row contains NaN. The code of
// NaN is the zero point.
void quantize_input(const RealInput &x, const Quantizer &b, void *codes, uint8_t *nan);

// Multiplies grad (T, N, C) by 0 where a code was clamped or the value is NaN.
void mask_input(const RealInput &x, const Quantizer &b, float *grad);

// clamp(round(v * m), lo, hi) for the codes of a layer below; lo and hi are minus the zero point.
// Codes of more than 16 bits, and rules but that of ties to even, use m = M / 2^k in integers.
struct Requantizer {
    double m = 1;
    double lo = 0, hi = 0;
    int64_t from_zero = 0, to_zero = 0;
    Container from = Container::i8, to = Container::i8;
    bool narrow = true;  // both codes have at most 16 bits, and ties go to even
    int64_t M = 0;       // of 24 bits
    int k = 0, rule = QG_HALF_EVEN;
    // What makes rounding to even round by the rule, for products that are not negative and for
    // others.
    double above = 0, below = 0;
};

// Requantizes `count` contiguous rows of n codes. Rows of the result are `to_row` elements apart.
void requantize(const Requantizer &r, const void *codes, int64_t count, int64_t n, void *to,
                int64_t to_row);

// Multiplies grad by 0 where `requantize` clamped. Rows of grad are `grad_row` elements apart.
void mask_requantized(const Requantizer &r, const void *codes, int64_t count, int64_t n,
                      float *grad, int64_t grad_row);

}  // namespace quant_gru
