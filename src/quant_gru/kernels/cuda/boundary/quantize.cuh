// Quantization of real values to codes.
//
//   EXACT: 1 if the inverses of scales are exact, 0 if not; undefined if Division.exact decides
//   WHOLE: 1 if codes use the whole range of a byte; 0 or undefined for any range
#ifndef QUANT_GRU_QUANTIZE_CUH
#define QUANT_GRU_QUANTIZE_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

#ifndef WHOLE
#define WHOLE 0
#endif

// Return clamp(round(v / s), lo, hi), a float32 division and the rule for real values. NaN becomes
// 0 and sets `seen`.
inline int quantized(float v, float scale, float lo, float hi, bool &seen) {
    const float y = divided(v, scale);
    const bool nan = y != y;
    seen |= nan;
    // clamping before rounding gives the same result, since the limits are integers
    const float inside = nan ? 0.f : Magic<float>::limit(y, lo, hi);
    return Magic<float>::integer(round_exact<QG_INPUT_RULE>(inside));
}

// Constants for a division without branches. Requires 2^-90 <= scale <= 2^90, limits below 2^20.
struct Division {
    float scale, inverse;  // the inverse is rounded once
    float least, most;     // (limit - zero point) * scale, rounded once
    int32_t exact;         // whether the inverse is exact
};

#ifdef EXACT
inline bool is_exact(const Division &) { return EXACT; }
#else
inline bool is_exact(const Division &d) { return d.exact != 0; }
#endif

// Convert a value within the limits to its code plus the magic number. The limits are multiples of
// the scale, so the remainder does not overflow; it underflows only if the value rounds to 0. The
// first remainder corrects a quotient that is off by some ulps to within one ulp. The second
// remainder corrects it to the nearest.
inline float rounded_quotient(float inside, const Division &d) {
    typedef Magic<float> R;
    float y = R::times(inside, d.inverse);
    y = R::fma(R::fma(-y, d.scale, inside), d.inverse, y);
    y = R::fma(R::fma(-y, d.scale, inside), d.inverse, y);
    return round_exact<QG_INPUT_RULE>(y);
}

// Convert any value to its code plus the magic number with QG_FLOOR. It divides before it clamps:
// the quotient of a limit that was rounded may be less than the limit. A small negative quotient
// must not become 0.
inline float floor_of(float v, const Division &d) {
    typedef Magic<float> R;
    const float lo = plain(R::plus(divided(d.least, d.scale), R::number()));
    const float hi = plain(R::plus(divided(d.most, d.scale), R::number()));
    return R::plus_down(R::limit(divided(v, d.scale), lo, hi), R::number());
}

// The same without branches.
inline int quantized(float v, const Division &d, bool &seen) {
    const bool nan = v != v;
    seen |= nan;
    if (QG_INPUT_RULE == QG_FLOOR) return Magic<float>::integer(floor_of(nan ? 0.f : v, d));
    const float inside = nan ? 0.f : Magic<float>::limit(v, d.least, d.most);
    return Magic<float>::integer(rounded_quotient(inside, d));
}

// Return whether any value may be NaN. True if one is; also true if infinities of opposite sign
// are added, since products of two values can overflow.
template <int kFours>
inline bool may_have_nan(const uint32_t (&bits)[kFours][4]) {
    typedef Magic<float> R;
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        even = R::fma(bits_as_float(bits[i][0]), bits_as_float(bits[i][1]), even);
        odd = R::fma(bits_as_float(bits[i][2]), bits_as_float(bits[i][3]), odd);
    }
    const float sum = R::plus(even, odd);
    return sum != sum;
}

// Replace NaN by 0, and return whether there was one.
inline bool without_nan(uint32_t (&bits)[4]) {
    bool seen = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float v = bits_as_float(bits[i]);
        seen |= v != v;
        bits[i] = v != v ? 0 : bits[i];
    }
    return seen;
}

// Return the code of a value plus the magic number, if the inverse is exact.
inline float times_inverse(float v, const Division &d) {
    typedef Magic<float> R;
    if (QG_INPUT_RULE == QG_HALF_EVEN) return R::fma(v, d.inverse, R::number());
    return round_exact<QG_INPUT_RULE>(R::times(v, d.inverse));
}

// Compute the codes of four values without NaN, plus the magic number. kExact: see `is_exact`.
template <bool kExact>
inline void four_codes(const Division &d, const uint32_t (&bits)[4], uint32_t (&raw)[4]) {
    typedef Magic<float> R;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (QG_INPUT_RULE == QG_FLOOR && !kExact) {
            raw[i] = (uint32_t)R::raw(floor_of(bits_as_float(bits[i]), d));
            continue;
        }
        const float v = R::limit(bits_as_float(bits[i]), d.least, d.most);
        const float y = kExact ? times_inverse(v, d) : rounded_quotient(v, d);
        raw[i] = (uint32_t)R::raw(y);
    }
}

// Compute the codes of all values, and pass each group of four to `put(i, raw)`.
template <int kFours, class Put>
inline void all_codes(const Division &d, const uint32_t (&bits)[kFours][4], const Put &put) {
    uint32_t raw[4];
    if (is_exact(d)) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            four_codes<true>(d, bits[i], raw);
            put(i, raw);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
            four_codes<false>(d, bits[i], raw);
            put(i, raw);
        }
    }
}

// Add `zero` to four codes and pack them in bytes: one byte per code, or two, where the code is
// 256 * first + second + 128.
template <int kPlanes>
inline void in_bytes(const uint32_t (&raw)[4], int zero, uint32_t (&words)[kPlanes]) {
    // the codes are offset to be nonnegative, so that packed sums do not carry into the next code;
    // the last step restores the sign
    const uint32_t least = (uint32_t)(zero - Magic<float>::raw_zero());
    if (kPlanes == 1) {
        const uint32_t all = raw[0] + (raw[1] << 8) + (raw[2] << 16) + (raw[3] << 24);
        words[0] = all + (least + 128) * 0x01010101u ^ 0x80808080u;
    } else {
        const uint32_t halves = (least + 32768) * 0x00010001u;
        const uint32_t low = raw[0] + (raw[1] << 16) + halves;
        const uint32_t high = raw[2] + (raw[3] << 16) + halves;
        words[0] = odd_bytes(low, high) ^ 0x80808080u;
        words[kPlanes - 1] = even_bytes(low, high) ^ 0x80808080u;
    }
}

// The same for codes that use the whole range of a byte, with an exact inverse: an instruction that
// saturates to a byte applies the limits.
inline uint32_t whole_codes(const Division &d, const uint32_t (&bits)[4], int zero) {
    typedef Magic<float> R;
    const float back = (float)(zero - (int)R::number());
    int v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float y = times_inverse(bits_as_float(bits[i]), d);
        v[i] = __float2int_rn(R::plus(y, back));
    }
    return saturated_bytes<true>(v[0], v[1], saturated_bytes<true>(v[2], v[3], 0));
}

#endif
