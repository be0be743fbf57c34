// The float GRU layer by layer, with the states of every step.
//
// It runs in double. The order of sums then changes a value by 1e-15, and observers, which round to
// float, see the values that Python's do.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "quant_gru/parameters.hpp"

namespace quant_gru {

// Inputs and states of one layer and direction, by the valid steps of all sequences, in the order
// of processing.
struct FloatRun {
    size_t cell;
    int64_t rows, C;           // rows: valid steps of all sequences
    const double *x, *before;  // (rows, C), (rows, H)
    const double *after;       // (rows, H)
    const double *states;      // (T + 1, N, H), the states before each step and after the last
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
    std::vector<double> W, R, bx, br;
};

// Runs all layers, and shows each layer and direction. Returns the output (T, N, directions * H),
// 0 beyond the lengths, and writes the last states (layers * directions, N, H) unless h_n is null.
// Throws ArgumentError.
std::vector<double> run_layers(const GRUShape &shape, const std::vector<FloatCell> &cells,
                               const FloatInput &input, float *h_n,
                               const std::function<void(const FloatRun &)> &show);

}  // namespace quant_gru
