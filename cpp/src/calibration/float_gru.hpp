// The float GRU layer by layer, with the states of every step.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "quant_gru/parameters.hpp"

namespace quant_gru {

// Inputs and states of one layer and direction, by the valid steps of all sequences.
struct FloatRun {
    size_t cell;
    int64_t rows, C;          // rows: valid steps of all sequences
    const float *x, *before;  // (rows, C), (rows, H)
    const float *after;       // (rows, H)
    const float *h0;          // (N, H)
};

struct FloatInput {
    const float *x;  // (T, N, C)
    int64_t T, N;
    const float *h0;         // (layers * directions, N, H) or null
    const int64_t *lengths;  // (N) or null
};

// Weights in the layout of ForwardPass: W (C, 3H), R (H, 3H), columns update, reset, candidate.
struct HasteCell {
    HasteCell(const FloatCell &cell, int64_t C, int64_t H);
    std::vector<float> W, R, bx, br;
};

// Runs all layers, and shows each layer and direction. Returns the output (T, N, directions * H),
// 0 beyond the lengths, and writes the last states (layers * directions, N, H) unless h_n is null.
// Throws ArgumentError.
std::vector<float> run_layers(const GRUShape &shape, const std::vector<FloatCell> &cells,
                              const FloatInput &input, float *h_n,
                              const std::function<void(const FloatRun &)> &show);

}  // namespace quant_gru
