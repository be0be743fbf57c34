// Real values of x as a projection reads them, four features at a time, and their codes.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
#ifndef QUANT_GRU_REALS_CUH
#define QUANT_GRU_REALS_CUH

#include "projected.cuh"
#include "quantize.cuh"

struct Reals {
    Projected to;
    const float *real;   // [t * step + n * next + feature]
    uint8_t *nan;        // (N, nan_stride): whether the row is NaN at a step
    int64_t step, next;  // in values
    int64_t C, nan_stride, parts;
    int64_t zero;  // of codes as they are kept in bytes
    Division division;
    int64_t fours;  // rows are made of aligned groups of four values
};

// Bits of four values of a row that starts at `start`, or zeros where that is -1.
template <bool kFours>
inline void load_four(const Reals &p, int64_t start, int feature, uint32_t (&bits)[4]) {
    const float *const at = p.real + start + feature;
    if (kFours) {
        uint4 v = {0, 0, 0, 0};
        if (start >= 0) v = *(const uint4 *)at;
        bits[0] = v.x;
        bits[1] = v.y;
        bits[2] = v.z;
        bits[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            bits[i] = 0;
            if (start >= 0 && feature + i < (int)p.C) bits[i] = float_bits(at[i]);
        }
    }
}

// Codes of four values as they are kept, and whether one of them is NaN.
inline bool four_codes(const Reals &p, const uint32_t (&bits)[4], uint32_t (&words)[PLANES]) {
    bool seen = false;
    uint32_t first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int v = quantized(bits_as_float(bits[i]), p.division, seen) + (int)p.zero;
        first |= (uint32_t)((PLANES == 1 ? v : v >> 8) & 255) << 8 * i;
        if (PLANES == 2) second |= (uint32_t)(v + 128 & 255) << 8 * i;
    }
    words[0] = first;
    if (PLANES == 2) words[PLANES - 1] = second;
    return seen;
}

#endif
