// The arguments of the kernels that rearrange arrays of passes over codes.
#pragma once

#include <stdint.h>

namespace quant_gru {

// An array (m, n) and the one that is made of it.
struct RearrangedC {
    uint64_t from, to;
    int64_t m, n;
};

}  // namespace quant_gru
