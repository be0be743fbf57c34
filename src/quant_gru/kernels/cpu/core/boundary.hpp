// Codes of a backward's inputs, and the places that were clamped to make them.
#pragma once

#include <cstdint>

#include "cpu/core/plan.hpp"

namespace quant_gru {

// Real values (T, N, C), the features side by side.
struct RealInput {
    const float *values = nullptr;
    int64_t step = 0, row = 0, T = 0, N = 0, C = 0;
};

// codes (T, N, C) in b.container; nan (T, N): whether a value of the row is NaN, whose code is the
// zero point.
void quantize_input(const RealInput &x, const Quantizer &b, void *codes, uint8_t *nan);

// grad (T, N, C) times 0 where a code was clamped or is that of NaN.
void mask_input(const RealInput &x, const Quantizer &b, float *grad);

// clamp(rne(v * m), lo, hi) of a layer below: limits less the zero point.
struct Requantizer {
    double m = 1;
    double lo = 0, hi = 0;
    int32_t from_zero = 0, to_zero = 0;
    Container from = Container::i8, to = Container::i8;
};

// `count` rows of n codes, side by side; the rows of the result are `to_row` apart.
void requantize(const Requantizer &r, const void *codes, int64_t count, int64_t n, void *to,
                int64_t to_row);

// grad times 0 where `requantize` clamped; rows of grad are `grad_row` apart.
void mask_requantized(const Requantizer &r, const void *codes, int64_t count, int64_t n,
                      float *grad, int64_t grad_row);

}  // namespace quant_gru
