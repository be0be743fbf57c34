/* Scales, codes and plan numbers of one weight row. The CPU and CUDA kernels that requantize
 * weights in training use these functions. They perform the same IEEE operations as
 * integer/weights.py and integer/plan.py.
 *
 * Compilers must not contract these operations to fused multiply-adds.
 */
#ifndef QUANT_GRU_WEIGHTS_H
#define QUANT_GRU_WEIGHTS_H

#include <stdint.h>

#define QG_FINER 2                              /* candidates finer than the covering exponent */
#define QG_SHARES 7                             /* candidates that are shares of a free scale */
#define QG_FREE (QG_SHARES + QG_FINER + 1)      /* candidates for a free scale */
#define QG_SHARE 0.00390625                     /* 2^-8: smallest scale / largest scale */
#define QG_LEAST_SCALE 1.1754943508222875e-38   /* 2^-126 */
#define QG_LARGEST_SCALE 1.7014118346046923e+38 /* 2^127 */
#define QG_LARGEST_FLOAT 3.4028234663852886e+38

typedef union {
    double value;
    uint64_t bits;
} qg_bits;

/* 2^e for -1022 <= e <= 1023. */
static inline double qg_power(int e) {
    qg_bits v;
    v.bits = (uint64_t)(e + 1023) << 52;
    return v.value;
}

/* The exponent that frexp returns. v must be 0 or a positive normal number. */
static inline int qg_exponent(double v) {
    qg_bits b;
    b.value = v;
    return v == 0 ? 0 : (int)(b.bits >> 52) - 1022;
}

static inline double qg_within(double v, double lo, double hi) {
    return v < lo ? lo : v > hi ? hi : v;
}

/* ceil(log2(n)) for n >= 1 */
static inline int qg_ceil_log2(int64_t n) {
    int bits = 0;
    while (((int64_t)1 << bits) < n) ++bits;
    return bits;
}

/* The largest exponent for which the codes of scale 2^-exponent cover [least, most]. */
static inline int qg_covering(double least, double most, int bits, double lo, double hi) {
    const double largest = -least > most ? -least : most;
    const int guess = bits - 1 - qg_exponent(largest);
    int covering = guess - 1;
    for (int e = guess; e < guess + 2; ++e) {
        const double scale = qg_power(e);
        if (rint(least * scale) >= lo && rint(most * scale) <= hi) covering = e;
    }
    return covering;
}

/* Squared error of v at the exponent `covering + finer`, in units of the covering scale. */
static inline double qg_error(double v, int covering, int finer, double lo, double hi) {
    const double y = v * qg_power(covering + finer);
    const double error = (y - qg_within(rint(y), lo, hi)) * qg_power(-finer);
    return error * error;
}

/* The factor by which errors are multiplied before rounding, so that a sum of n errors is exact. */
static inline double qg_quantum(double largest_error, int64_t n) {
    return qg_power(52 - qg_ceil_log2(n < 1 ? 1 : n) - qg_exponent(largest_error));
}

/* The exponent with the smallest error. A tie selects the finer exponent. */
static inline int qg_best(const double *sums, int covering) {
    int best = QG_FINER;
    for (int finer = QG_FINER - 1; finer >= 0; --finer)
        if (sums[finer] < sums[best]) best = finer;
    const int exponent = covering + best;
    return exponent < -127 ? -127 : exponent > 126 ? 126 : exponent;
}

/* The free scale that covers a row whose values are in [least, most]. */
static inline double qg_free_covering(double least, double most, double hi) {
    const double largest = -least > most ? -least : most;
    return (double)(float)(largest / (hi < 1 ? 1 : hi));
}

/* Whether finer scales and power-of-two scales are also tried, for a row of n values. */
static inline int qg_searches_free(double covering, int bits, int64_t n) {
    return n > 1 && bits <= 8 && covering >= 7.888609052210118e-31 /* 2^-100 */ &&
           covering <= 1.2676506002282294e+30 /* 2^100 */;
}

/* Write the candidates: shares of the covering free scale, then powers of two. `exponent` is the
 * covering exponent of the powers of two. */
static inline void qg_free_candidates(double covering, int exponent, double *to) {
    static const double sixteenths[QG_SHARES] = {16, 15, 14, 12, 10, 8, 6};
    for (int i = 0; i < QG_SHARES; ++i) to[i] = (double)(float)(covering * (sixteenths[i] / 16));
    for (int finer = 0; finer <= QG_FINER; ++finer)
        to[QG_SHARES + finer] = qg_power((int)qg_within(-exponent - finer, -126, 127));
}

/* Squared error of v at `scale`, multiplied by the quantum and rounded. `share` is `scale` divided
 * by the covering scale, so that errors of all candidates have the same unit. */
static inline double qg_free_error(double v, double scale, double share, double quantum, double lo,
                                   double hi) {
    const double y = v / scale;
    const double error = (y - qg_within(rint(y), lo, hi)) * share;
    const double squared = error * error;
    return rint(squared * quantum);
}

/* The factor by which errors are multiplied. No error exceeds the error of code 0, so a sum of n
 * errors is exact. */
static inline double qg_free_quantum(int bits, int64_t n) {
    return qg_power(52 - qg_ceil_log2(n) - 2 * bits);
}

/* The candidate with the smallest error. A tie selects the first candidate. */
static inline double qg_free_best(const double *sums, const double *candidates) {
    int best = 0;
    for (int i = 1; i < QG_FREE; ++i)
        if (sums[i] < sums[best]) best = i;
    return candidates[best];
}

static inline float qg_finished(double scale) {
    return scale > 0 ? (float)qg_within(scale, QG_LEAST_SCALE, QG_LARGEST_SCALE) : 1.f;
}

/* The final scale of a matrix row. `scale` is 0 for a row of zeros. `largest` is the largest scale
 * of the matrix. */
static inline float qg_matrix_scale(double scale, double largest) {
    const double least = largest * QG_SHARE;
    return qg_finished(scale < least ? least : scale);
}

static inline float qg_bias_scale(double scale, double largest) {
    return qg_finished(scale == 0 ? largest : scale);
}

/* clamp(rint(v / s)) */
static inline int64_t qg_code(float v, float scale, double lo, double hi) {
    return (int64_t)qg_within((double)rintf(v / scale), lo, hi);
}

/* The factor of the errors of a row before they are summed: 2^-e of a scale below 2^e. */
static inline double qg_row_factor(float scale) { return qg_power(-qg_exponent(scale)); }

/* The error of a weight times the mean of its input, an integer; see integer/bias_correction.py. */
static inline double qg_mean_error(float w, float scale, double code, double row_factor,
                                   double factor, double limit) {
    const double product = (double)scale * code;
    const double error = (double)w - product;
    return qg_within(rint(error * row_factor * factor), -limit, limit);
}

/* A bias with the sum of the mean errors of its row. */
static inline float qg_corrected(float b, double sum, float scale, int exponent) {
    const double correction = sum * qg_power(qg_exponent(scale) + exponent);
    return (float)qg_within((double)b + correction, -QG_LARGEST_FLOAT, QG_LARGEST_FLOAT);
}

/* The numbers of the plan for one channel, besides its codes. */
typedef struct {
    int64_t B, M, k;
    double m; /* M / 2^k */
} qg_channel;

static inline qg_channel qg_channel_of(int64_t bias_code, float bias_scale, float scale,
                                       double operand_scale, double result_scale, double bias_unit,
                                       double limit, int significant) {
    qg_channel c;
    const double unit = (double)scale * operand_scale;
    const double B = (double)bias_code * (double)bias_scale / (unit * bias_unit);
    const double ratio = unit / result_scale;
    const int exponent = qg_exponent(ratio);
    c.B = (int64_t)qg_within(rint(B), -limit, limit);
    c.M = (int64_t)rint(ratio * qg_power(-exponent) * qg_power(significant));
    c.k = significant - exponent;
    if (c.M == (int64_t)1 << significant) {
        c.M >>= 1;
        --c.k;
    }
    c.m = (double)c.M * qg_power((int)-c.k);
    return c;
}

#endif
