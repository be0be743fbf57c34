// Converts weights to the numbers of the plan at every training step. Each warp processes one
// matrix row and its bias. row_scales.cu chooses each row's scale. correct_bias.cu adds the mean
// errors of a row to its bias. requantize.cu raises the scale to a minimum share of the largest one
// and writes everything that depends on it.
#ifndef QUANT_GRU_WEIGHTS_CUH
#define QUANT_GRU_WEIGHTS_CUH

#include "c99/weight_rows.h"
#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

struct Operand {             // W or R, with its bias
    const void *w;           // (3H, K), rows in the order reset, update, candidate
    const void *b;           // (3H), or null for zeros
    const uint8_t *dropped;  // (3H, K) codes that become 0, or null
    double *w_scale;         // (3H), from the first kernel; negative if a value is not finite
    double *b_scale;
    // results: rows in the order update, reset, candidate; a null pointer is skipped
    void *codes;
    void *b_codes;
    float *scales;
    float *b_scales;
    int64_t *B;
    int64_t *M;
    int64_t *k;
    double *m;
    int8_t *gemm;   // (planes * 3H + .., padded)
    int8_t *tiles;  // see wgmma_pingpong.cuh
    int64_t *folded;
    int32_t *folded_bytes;
    float *m_float;
    int32_t *exact_float;
    const double *factors;  // (K) for the correction of the bias, or null; see c99/weight_rows.h
    float *corrected;       // (3H) the bias with its correction, in the row order of b
    int64_t w_real, b_real, kind, b_kind;  // dtypes
    int64_t K, padded, planes, significant, fold, fold_words, reach;
    double lo, hi, b_lo, b_hi, operand_scale, result_scale, b_unit, limit, term_limit;
    int64_t bits, b_bits;
    // `whole` selects the conditions of exact_float on accumulators and multipliers: 1 if
    // R h is in int32, 2 if x has two planes, otherwise 0
    int64_t whole, long_sums, unit_exponent;
    double added;  // magnitude of the constant that is added before rounding to a byte
};

struct Fragments {  // R as the A operand of the MMA instruction, see derived.cuh
    int8_t *bytes;
    double *bias;
    double *m;
    int64_t features, units;
};

struct Weights {
    Operand operands[2];
    Fragments fragments[4];
    uint8_t *finite;
    int64_t H, count, planes_R, free;
    float keep;           // 1 - p: divides the scales of R if codes are dropped with probability p
    int32_t *columns[2];  // transposed codes (K, 3H), which derive.cu writes
};

inline double real_half(uint16_t v) {
    const float sign = v & 0x8000 ? -1.f : 1.f;
    if ((v & 0x7c00) == 0x7c00) return __int_as_float(0x7f800000);
    return sign * (__int_as_float((v & 0x7fff) << 13) * 5.192296858534828e33f);  // 2^112
}

// Returns a value as float32, or 0 if the float32 value is not finite. Sets `bad` if the value
// itself is not finite.
inline float real(const void *values, int64_t kind, int64_t i, bool &bad) {
    double v;
    switch (kind) {
        case 0:
            v = ((const float *)values)[i];
            break;
        case 1:
            v = real_half(((const uint16_t *)values)[i]);
            break;
        case 2:
            v = __int_as_float((int32_t)((uint32_t)((const uint16_t *)values)[i] << 16));
            break;
        default:
            v = ((const double *)values)[i];
    }
    bad |= !(v - v == 0);
    const float narrow = (float)v;
    return narrow - narrow == 0 ? narrow : 0.f;
}

inline int64_t bits_of(double v) {
    qg_bits b;
    b.value = v;
    return (int64_t)b.bits;
}
inline double from_bits(int64_t v) {
    qg_bits b;
    b.bits = (uint64_t)v;
    return b.value;
}
inline double warp_largest(double v) {
    for (int mask = 16; mask; mask >>= 1) {
        const double other = from_bits(shuffle_xor(bits_of(v), mask));
        v = other > v ? other : v;
    }
    return v;
}
inline double warp_sum(double v) {
    for (int mask = 16; mask; mask >>= 1) v += from_bits(shuffle_xor(bits_of(v), mask));
    return v;
}
inline int64_t warp_sum(int64_t v) {
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

// Returns the largest magnitude of n scales. Sets `bad` if a scale is negative.
inline double largest_of(const double *scales, int n, bool &bad) {
    double largest = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const int64_t bits = bits_of(scales[i]);
        bad |= bits < 0;
        const double v = from_bits(bits & 0x7fffffffffffffffLL);
        largest = v > largest ? v : largest;
    }
    return warp_largest(largest);
}

#endif
