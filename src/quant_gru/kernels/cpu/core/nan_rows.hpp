// NaN has no code. These functions find rows that are NaN beside the codes.
#pragma once

#include <cstdint>
#include <vector>

namespace quant_gru {

// One byte per row: 1 where it is NaN.
using NaNRows = std::vector<uint8_t>;

// Rows of values (steps, rows, n) in which any value is NaN: (steps, rows).
NaNRows rows_with_nan(const float *values, int64_t steps, int64_t step, int64_t rows, int64_t row,
                      int64_t n);

// Spreads NaN over a layer's direction, from each step to all that are processed after it.
// x_nan: (T, N), rows of the input that are NaN. state: (N), rows of the initial state that are;
// becomes those of the last state. Returns those of the outputs, (T, N).
NaNRows spread_nan(const NaNRows &x_nan, NaNRows &state, bool reverse);

// Fills rows of values (steps, rows, n) with NaN.
void fill_nan(const NaNRows &nan, float *values, int64_t steps, int64_t step, int64_t rows,
              int64_t row, int64_t n);

}  // namespace quant_gru
