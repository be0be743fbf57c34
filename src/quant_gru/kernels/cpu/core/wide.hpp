// The generic kernel: any widths up to 32 bits. Sums of products are made in 64 bits, whole or as
// those of two halves of the operand; what 64 bits do not hold is rounded in 128.
#pragma once

#include "cpu/core/plan.hpp"

namespace quant_gru {

// One matrix product in plain row-major codes.
struct WideProjection {
    int inputs = 0;
    const int32_t *w = nullptr;     // (channels, inputs)
    const int64_t *bias = nullptr;  // (channels), in 2^bias_shift accumulator units
    int bias_shift = 0;
    const int64_t *M = nullptr, *k = nullptr;  // (channels)
    int64_t lo = 0, hi = 0;                    // limits less the zero point of the result
    int64_t zero = 0;                          // zero point of the operand
    bool in_word = false;                      // whether 64 bits hold the sums of products
};

// Sums of products of all channels: sums[c] = sum over i of w[c][i] * v[i].
struct WideSums {
    const int32_t *w;  // (channels, inputs)
    const int32_t *v;  // (inputs)
    int channels, inputs;
    int64_t *sums;  // (channels)
};

struct WidePlan : Cell {
    WideProjection W, R;
};

// The zero-point-free output code of an input code in a segment.
int64_t polynomial(const Table &t, int segment, int64_t q);

// The zero-point-free output code of a zero-point-free input code, by the definition itself.
int64_t look_up(const Table &t, int64_t v);

int64_t workspace_bytes(const WidePlan &plan);
void run_wide(const WidePlan &plan, const Job &job, void (*multiply)(const WideSums &));

}  // namespace quant_gru
