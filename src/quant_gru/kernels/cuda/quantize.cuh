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

// A quantizer's numbers for a division without a branch: 2^-90 <= scale <= 2^90, limits below 2^20.
struct Division {
    float scale, inverse;  // the latter rounded once
    float least, most;     // limits less the zero point, times the scale, rounded once
};

// The same. Values are clamped first, to multiples of the scale, and what is left neither overflows
// nor, where it does not round to 0, underflows: a quotient off by some units in the last place
// gets within one by its remainder, and by a second one it is the nearest.
inline int quantized(float v, const Division &d, bool &seen) {
    typedef Magic<float> R;
    const bool nan = v != v;
    seen |= nan;
    const float inside = nan ? 0.f : R::limit(v, d.least, d.most);
    float y = R::times(inside, d.inverse);
    y = R::fma(R::fma(-y, d.scale, inside), d.inverse, y);
    y = R::fma(R::fma(-y, d.scale, inside), d.inverse, y);
    return R::integer(R::plus(y, R::number()));
}

#endif
