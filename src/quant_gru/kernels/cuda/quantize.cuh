// Real values to codes.
#ifndef QUANT_GRU_QUANTIZE_CUH
#define QUANT_GRU_QUANTIZE_CUH

#include "cell.cuh"
#include "ptx.cuh"

// clamp(rint(v / s), lo, hi): a float32 division, ties to even. NaN becomes 0, and is seen.
inline int quantized(float v, float scale, float lo, float hi, bool &seen) {
    const float y = divided(v, scale);
    const bool nan = y != y;
    seen |= nan;
    // clamping first is the same, for the limits are integers
    const float inside = nan ? 0.f : Magic<float>::limit(y, lo, hi);
    return Magic<float>::integer(Magic<float>::plus(inside, 12582912.f));
}

#endif
