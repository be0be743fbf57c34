// The rows of a packed sequence, step after step: step t has the first batch_sizes[t] rows.
#pragma once

#include <cstdint>

namespace quant_gru {

struct PackedRows {
    int64_t N;      // rows of the first step
    int64_t rows;   // rows of all steps
    int64_t wrong;  // the first step whose size is negative or exceeds the previous one, or -1
};

inline PackedRows packed_rows(const int64_t *batch_sizes, int64_t T) {
    PackedRows found{batch_sizes[0], 0, -1};
    for (int64_t t = 0; t < T; ++t) {
        if (batch_sizes[t] < 0 || batch_sizes[t] > batch_sizes[t ? t - 1 : 0]) return {0, 0, t};
        found.rows += batch_sizes[t];
    }
    return found;
}

// Writes the number of steps of each of N rows, then the start of the rows of each of T steps, then
// their end. The sizes must be checked already; N is the first of them.
inline void packed_layout(const int64_t *batch_sizes, int64_t T, int64_t N, int64_t *to) {
    int64_t n = 0;
    for (int64_t t = T; t > 0; --t)
        for (; n < batch_sizes[t - 1]; ++n) to[n] = t;
    int64_t *const starts = to + N;
    starts[0] = 0;
    for (int64_t t = 0; t < T; ++t) starts[t + 1] = starts[t] + batch_sizes[t];
}

}  // namespace quant_gru
