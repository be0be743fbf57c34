// Rows of a packed sequence: step t has its first batch_sizes[t] rows, one step after the other.
#pragma once

#include <cstdint>

namespace quant_gru {

struct PackedRows {
    int64_t rows;   // of all steps
    int64_t wrong;  // the first step of a size that is negative or grows, or -1
};

inline PackedRows packed_rows(const int64_t *batch_sizes, int64_t T) {
    PackedRows found{0, -1};
    for (int64_t t = 0; t < T; ++t) {
        if (batch_sizes[t] < 0 || batch_sizes[t] > batch_sizes[t ? t - 1 : 0]) return {0, t};
        found.rows += batch_sizes[t];
    }
    return found;
}

// Where each row stands among T * N, and how many steps each of N rows has. The sizes have been
// checked, and N is the first of them.
inline void place_packed_rows(const int64_t *batch_sizes, int64_t T, int64_t N, int64_t *places,
                              int64_t *lengths) {
    for (int64_t t = 0; t < T; ++t)
        for (int64_t n = 0; n < batch_sizes[t]; ++n) *places++ = t * N + n;
    int64_t n = 0;
    for (int64_t t = T; t > 0; --t)
        for (; n < batch_sizes[t - 1]; ++n) lengths[n] = t;
}

}  // namespace quant_gru
