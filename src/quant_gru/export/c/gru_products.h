/* Products of a matrix and a vector, each row requantized to a code.
 *
 * There is one loop in portable C for each width, one for the dual 16-bit multiplies of Cortex-M4,
 * M7 and M33, and one for Helium (Cortex-M55 and M85). The macros of the compiler choose.
 * Define QG_PORTABLE to use portable C everywhere.
 */
#ifndef QUANT_GRU_PRODUCTS_H
#define QUANT_GRU_PRODUCTS_H

#include "gru_arithmetic.h"

#if defined(QG_PORTABLE)
#elif defined(__ARM_FEATURE_MVE) && (__ARM_FEATURE_MVE & 1)
#define QG_HELIUM 1
#include <arm_mve.h>
#elif defined(__ARM_FEATURE_SIMD32) && __ARM_FEATURE_SIMD32 && !defined(__ARM_BIG_ENDIAN)
#define QG_DUAL 1
#include <arm_acle.h>
#endif

/* 8-bit weights and sums of 32 bits. `w`: (rows, K), `x`: codes less the offset of the operand.
 * Sums may wrap on the way; with the bias they fit. */
QG_INLINE void qg_product_8(const qg_rows *p, const int8_t *w, const int32_t *bias, int rows, int K,
                           const int16_t *x, qg_value *out) {
    int c = 0, i;
    for (; c + 4 <= rows; c += 4) {
        const int8_t *const w0 = w + (size_t)c * (size_t)K, *const w1 = w0 + K, *const w2 = w1 + K,
                           *const w3 = w2 + K;
        uint32_t s0 = (uint32_t)bias[c], s1 = (uint32_t)bias[c + 1];
        uint32_t s2 = (uint32_t)bias[c + 2], s3 = (uint32_t)bias[c + 3];
        for (i = 0; i < K; ++i) {
            const int32_t v = x[i];
            s0 += (uint32_t)(w0[i] * v);
            s1 += (uint32_t)(w1[i] * v);
            s2 += (uint32_t)(w2[i] * v);
            s3 += (uint32_t)(w3[i] * v);
        }
        out[c] = qg_requantize(p, c, (int32_t)s0);
        out[c + 1] = qg_requantize(p, c + 1, (int32_t)s1);
        out[c + 2] = qg_requantize(p, c + 2, (int32_t)s2);
        out[c + 3] = qg_requantize(p, c + 3, (int32_t)s3);
    }
    for (; c < rows; ++c) {
        uint32_t s = (uint32_t)bias[c];
        for (i = 0; i < K; ++i) s += (uint32_t)(w[(size_t)c * (size_t)K + (size_t)i] * x[i]);
        out[c] = qg_requantize(p, c, (int32_t)s);
    }
}

/* Weights of up to 16 bits, operands of up to 16 bits, sums of 64 bits. */
QG_INLINE void qg_product_16(const qg_rows *p, const int16_t *w, const int64_t *bias, int rows,
                            int K, const int16_t *x, qg_value *out) {
    int c, i;
    for (c = 0; c < rows; ++c, w += K) {
        int64_t s = bias[c];
        for (i = 0; i < K; ++i) s += (int32_t)w[i] * x[i];
        out[c] = qg_requantize(p, c, s);
    }
}

/* Any operands, sums of 64 bits. */
QG_INLINE void qg_product_32(const qg_rows *p, const int32_t *w, const int64_t *bias, int rows,
                            int K, const int32_t *x, qg_value *out) {
    int c, i;
    for (c = 0; c < rows; ++c, w += K) {
        uint64_t s = (uint64_t)bias[c];
        for (i = 0; i < K; ++i) s += (uint64_t)((int64_t)w[i] * x[i]);
        out[c] = qg_requantize(p, c, (int64_t)s);
    }
}

/* Any operands, sums beyond 64 bits. `x` is the operand less its zero point. */
QG_INLINE void qg_product_wide(const qg_rows *p, const int32_t *w, const int64_t *bias, int rows,
                               int K, const int64_t *x, qg_value *out) {
    int c, i;
    for (c = 0; c < rows; ++c, w += K) {
        int64_t high = 0, low = 0;
        for (i = 0; i < K; ++i) {
            high += w[i] * (x[i] >> 16);
            low += w[i] * (x[i] & 0xffff);
        }
        out[c] = qg_requantize_wide(p, c, high, low, bias[c]);
    }
}

#endif
