// Rows of a packed sequence: step t has its first batch_sizes[t] rows, one step after the other.
#pragma once

#include <cstdint>

namespace quant_gru {

struct PackedRows {
    int64_t rows;   // of all steps
    int64_t wrong;  // the first step of a size that is negative or grows, or -1
};

PackedRows packed_rows(const int64_t *batch_sizes, int64_t T);

// Where each row stands among T * N, and how many steps each of N rows has. The sizes have been
// checked, and N is the first of them.
void place_packed_rows(const int64_t *batch_sizes, int64_t T, int64_t N, int64_t *places,
                       int64_t *lengths);

}  // namespace quant_gru
