/* Products of a matrix and a vector, each row requantized to a code.
 *
 * There is one loop in portable C for each width, one for the dual 16-bit multiplies of Cortex-M4,
 * M7 and M33, and one for Helium (Cortex-M55 and M85) in gru_helium.h. gru_arithmetic.h chooses.
 */
#ifndef QUANT_GRU_PRODUCTS_H
#define QUANT_GRU_PRODUCTS_H

#include "gru_arithmetic.h"

/* 8-bit weights and sums of 32 bits. `x`: codes (K) less the offset of the operand, with room for
 * whole vectors. Sums may wrap on the way; with the bias they fit. */
#if defined(QG_DUAL)

typedef uint32_t __attribute__((may_alias)) qg_word;

/* Weights in tiles of 4 rows and 4 columns. A half word is 256 * A + (B + 128), of two rows A and B
 * of one column. One multiply gives the sum of both rows. A second one, of the low bytes, gives
 * that of B. */
typedef uint32_t qg_weights8;

/* Add a tile to the sums of products of two pairs of rows. In assembly, because compilers load one
 * word at a time. */
QG_INLINE void qg_block32(const qg_weights8 **w, const qg_word **x, int32_t *a0, uint32_t *b0,
                          int32_t *a1, uint32_t *b1) {
    uint32_t x0, x1;
    __asm volatile(
        "ldrd %[x0], %[x1], [%[x]], #8\n\t"
        "ldmia %[w]!, {r4, r5, r6, r8}\n\t"
        "smlad %[a0], r4, %[x0], %[a0]\n\t"
        "uxtb16 r4, r4\n\t"
        "smlad %[a0], r5, %[x1], %[a0]\n\t"
        "uxtb16 r5, r5\n\t"
        "smlad %[b0], r4, %[x0], %[b0]\n\t"
        "smlad %[b0], r5, %[x1], %[b0]\n\t"
        "smlad %[a1], r6, %[x0], %[a1]\n\t"
        "uxtb16 r6, r6\n\t"
        "smlad %[a1], r8, %[x1], %[a1]\n\t"
        "uxtb16 r8, r8\n\t"
        "smlad %[b1], r6, %[x0], %[b1]\n\t"
        "smlad %[b1], r8, %[x1], %[b1]\n\t"
        : [w] "+r"(*w), [x] "+r"(*x), [a0] "+r"(*a0), [b0] "+r"(*b0), [a1] "+r"(*a1),
          [b1] "+r"(*b1), [x0] "=&r"(x0), [x1] "=&r"(x1)
        :
        : "r4", "r5", "r6", "r8", "memory");
}

/* The same where the sums of both rows need 64 bits. */
QG_INLINE void qg_block64(const qg_weights8 **w, const qg_word **x, int64_t *a0, uint32_t *b0,
                          int64_t *a1, uint32_t *b1) {
    uint32_t x0, x1;
    __asm volatile(
        "ldrd %[x0], %[x1], [%[x]], #8\n\t"
        "ldmia %[w]!, {r4, r5}\n\t"
        "smlald %Q[a0], %R[a0], r4, %[x0]\n\t"
        "uxtb16 r4, r4\n\t"
        "smlald %Q[a0], %R[a0], r5, %[x1]\n\t"
        "uxtb16 r5, r5\n\t"
        "smlad %[b0], r4, %[x0], %[b0]\n\t"
        "smlad %[b0], r5, %[x1], %[b0]\n\t"
        "ldmia %[w]!, {r4, r5}\n\t"
        "smlald %Q[a1], %R[a1], r4, %[x0]\n\t"
        "uxtb16 r4, r4\n\t"
        "smlald %Q[a1], %R[a1], r5, %[x1]\n\t"
        "uxtb16 r5, r5\n\t"
        "smlad %[b1], r4, %[x0], %[b1]\n\t"
        "smlad %[b1], r5, %[x1], %[b1]\n\t"
        : [w] "+r"(*w), [x] "+r"(*x), [a0] "+r"(*a0), [b0] "+r"(*b0), [a1] "+r"(*a1),
          [b1] "+r"(*b1), [x0] "=&r"(x0), [x1] "=&r"(x1)
        :
        : "r4", "r5", "memory");
}

/* Finish rows A and B from the sums of products `ab` and `b`. `x128` is 128 times the sum of x. */
QG_INLINE void qg_finish_pair(const qg_rows *p, const int32_t *bias, int rows, int c, int64_t ab,
                              uint32_t b, int64_t x128, qg_value *out) {
    const uint32_t sum_b = b - (uint32_t)x128;
    uint32_t sum_a;
    if (p->pairs == 32)
        sum_a = (uint32_t)((int32_t)((uint32_t)ab - b) >> 8);
    else if (p->pairs == 48)
        sum_a = (uint32_t)((ab - (int32_t)b) >> 8);
    else
        sum_a = (uint32_t)((ab - x128 - (int32_t)sum_b) >> 8);
    if (rows % 4 == 0 || c < rows)
        out[c] = qg_requantize(p, c, (int32_t)(sum_a + (uint32_t)bias[c]));
    if (rows % 4 == 0 || c + 1 < rows)
        out[c + 1] = qg_requantize(p, c + 1, (int32_t)(sum_b + (uint32_t)bias[c + 1]));
}

QG_INLINE void qg_product_8(const qg_rows *p, const qg_weights8 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    const qg_word *const words = (const qg_word *)x;
    const int blocks = (K + 3) / 4;
    int32_t sum = 0;
    int64_t x128;
    int c, i;
    (void)planes;
    for (i = K; i < 4 * blocks; ++i) x[i] = 0;
#pragma GCC unroll 4
    for (i = 0; i < 2 * blocks; ++i) sum = __smlad((int16x2_t)words[i], 0x10001, sum);
    x128 = (int64_t)sum * 128;
    for (c = 0; c < rows; c += 4) {
        const qg_word *v = words;
        uint32_t b0 = 0, b1 = 0;
        if (p->pairs == 32) {
            int32_t a0 = 0, a1 = 0;
#pragma GCC unroll 16
            for (i = 0; i < blocks; ++i) qg_block32(&w, &v, &a0, &b0, &a1, &b1);
            qg_finish_pair(p, bias, rows, c, a0, b0, x128, out);
            qg_finish_pair(p, bias, rows, c + 2, a1, b1, x128, out);
        } else {
            int64_t a0 = 0, a1 = 0;
#pragma GCC unroll 16
            for (i = 0; i < blocks; ++i) qg_block64(&w, &v, &a0, &b0, &a1, &b1);
            qg_finish_pair(p, bias, rows, c, a0, b0, x128, out);
            qg_finish_pair(p, bias, rows, c + 2, a1, b1, x128, out);
        }
    }
}

#elif defined(QG_HELIUM)

#include "gru_helium.h"

#else

/* Rows one after the other. */
typedef int8_t qg_weights8;

QG_INLINE void qg_product_8(const qg_rows *p, const qg_weights8 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    int c, i;
    (void)planes;
    for (c = 0; c < rows / 4 * 4; c += 4, w += 4 * K) {
        const int8_t *const w0 = w, *const w1 = w + K, *const w2 = w1 + K, *const w3 = w2 + K;
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
    if (rows % 4 == 0) return;
    for (c = rows / 4 * 4; c < rows; ++c, w += K) {
        uint32_t s = (uint32_t)bias[c];
        for (i = 0; i < K; ++i) s += (uint32_t)(w[i] * x[i]);
        out[c] = qg_requantize(p, c, (int32_t)s);
    }
}

#endif

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
