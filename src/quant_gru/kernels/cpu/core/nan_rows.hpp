// NaN has no code. These functions find the rows that become NaN, separately from the codes.
#pragma once

#include <cstdint>
#include <vector>

namespace quant_gru {

// One byte per row: 1 if the row is NaN.
using NaNRows = std::vector<uint8_t>;

// Finds the rows of values (steps, rows, n) that contain NaN. Returns (steps, rows).
NaNRows rows_with_nan(const float *values, int64_t steps, int64_t step, int64_t rows, int64_t row,
                      int64_t n);

// Propagates NaN in a layer and direction from each step to all later steps.
// x_nan: (T, N), NaN rows of the input. state: (N), NaN rows of the initial state; on return, NaN
// rows of the last state. Returns the NaN rows of the outputs, (T, N).
NaNRows spread_nan(const NaNRows &x_nan, NaNRows &state, bool reverse);

// Fills the marked rows of values (steps, rows, n) with NaN.
void fill_nan(const NaNRows &nan, float *values, int64_t steps, int64_t step, int64_t rows,
              int64_t row, int64_t n);

}  // namespace quant_gru
