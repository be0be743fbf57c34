// The backward of all layers and directions, from the codes that a forward kept.
#pragma once

#include <vector>

#include "cpu/core/real_values.hpp"
#include "cpu/core/stack.hpp"
#include "cpu/training/backward.hpp"

namespace quant_gru {

struct StackBackwardCall {
    struct Gradients {
        RealValues W, R, bw, br;
        bool is_wanted() const { return W.data || R.data || bw.data || br.data; }
    };
    RealValues x, h0;  // of the forward: (T, N, C), (cells, N, H); h0 absent for zeros
    const void *const *out = nullptr;  // codes (T, N, H) of each cell
    const float *nan = nullptr;        // (cells, N): NaN for rows that became NaN, else 0
    const int64_t *lengths = nullptr;  // (N) or null
    RealValues grad_y, grad_last;      // (T, N, directions * H), (cells, N, H); absent for zeros
    int64_t T = 0, N = 0;
    // results; absent: not wanted
    RealValues dx, dh0;
    std::vector<Gradients> cells;
    int threads = 1;
};

void run_backward(const Stack &stack, const std::vector<CellWeights> &weights,
                  const StackBackwardCall &call);

}  // namespace quant_gru
