// The arguments of the kernels that convert codes.
#pragma once

#include <stdint.h>

namespace quant_gru {

// Codes (count) of a quantizer and their real values.
template <class T>
struct CodesAndReals {
    T *codes;
    float *reals;
    int64_t count;
    float scale, zero;
};

}  // namespace quant_gru
