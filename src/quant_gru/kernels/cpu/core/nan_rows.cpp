#include "cpu/core/nan_rows.hpp"

#include <algorithm>
#include <limits>

namespace quant_gru {

NaNRows rows_with_nan(const float *values, int64_t steps, int64_t step, int64_t rows, int64_t row,
                      int64_t n) {
    NaNRows found(static_cast<size_t>(steps * rows));
    auto at = found.begin();
    for (int64_t t = 0; t < steps; ++t)
        for (int64_t r = 0; r < rows; ++r) {
            const float *v = values + t * step + r * row;
            int nan = 0;
            for (int64_t i = 0; i < n; ++i) nan |= v[i] != v[i];
            *at++ = nan != 0;
        }
    return found;
}

NaNRows spread_nan(const NaNRows &x_nan, NaNRows &state, bool reverse) {
    const size_t N = state.size(), T = x_nan.size() / N;
    NaNRows out(x_nan.size());
    for (size_t i = 0; i < T; ++i) {
        const size_t first = (reverse ? T - 1 - i : i) * N;
        for (size_t n = 0; n < N; ++n) out[first + n] = state[n] |= x_nan[first + n];
    }
    return out;
}

void fill_nan(const NaNRows &nan, float *values, int64_t steps, int64_t step, int64_t rows,
              int64_t row, int64_t n) {
    auto at = nan.begin();
    for (int64_t t = 0; t < steps; ++t)
        for (int64_t r = 0; r < rows; ++r)
            if (*at++)
                std::fill_n(values + t * step + r * row, n,
                            std::numeric_limits<float>::quiet_NaN());
}

}  // namespace quant_gru
