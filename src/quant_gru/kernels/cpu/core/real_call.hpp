// A call of a stack with real values of any dtype and layout.
#pragma once

#include "cpu/core/real_values.hpp"
#include "cpu/core/stack.hpp"

namespace quant_gru {

struct RealCall {
    RealValues x, h0, y, last;         // (T, N, C), (cells, N, H), (T, N, directions * H), as h0
    void *const *kept = nullptr;       // receive the codes (T, N, H) of each cell, or null
    float *nan = nullptr;              // receives (cells, N): NaN for NaN rows, else 0; or null
    const int64_t *lengths = nullptr;  // (N) or null
    int64_t T = 0, N = 0;
    int threads = 1;
};

void run_real(Stack &stack, const RealCall &call);

}  // namespace quant_gru
