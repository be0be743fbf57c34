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

#if !defined(QG_HELIUM)

/* Weights of 4, 2 or 1 bits (`bits`) in words of 4 rows. A half word has the codes of a column, row
 * after row, and of every second column after it up to 16 bits; the other half word has those of
 * the columns between. Codes are larger by half of their range, but for the last row at 4 bits, so
 * that a half word is a sum of signed numbers. */
QG_INLINE void qg_finish_rows(const qg_rows *p, const int32_t *bias, int rows, int c,
                              const uint32_t *sums, qg_value *out) {
    int r;
#pragma GCC unroll 4
    for (r = 0; r < 4; ++r)
        if (rows % 4 == 0 || c + r < rows)
            out[c + r] = qg_requantize(p, c + r, (int32_t)(sums[r] + (uint32_t)bias[c + r]));
}

#if defined(QG_DUAL)
QG_INLINE uint32_t qg_dual(uint32_t codes, uint32_t x, uint32_t sum) {
    return (uint32_t)__smlad((int16x2_t)codes, (int16x2_t)x, (int32_t)sum);
}

#define QG_WORD4(w, x, ALL) \
    "and %[t], %[m], " w    \
    "\n\t"                  \
    "smlad %[a], %[t], " x  \
    ", %[a]\n\t"            \
    "and %[t], %[m], " w    \
    ", lsr #8\n\t"          \
    "smlad %[c], %[t], " x  \
    ", %[c]\n\t"            \
    "uxtb16 %[t], " w       \
    "\n\t"                  \
    "smlad %[ab], %[t], " x ", %[ab]\n\t" ALL(w, x)
#define QG_ALL32(w, x) "smlad %[all], " w ", " x ", %[all]"
#define QG_ALL64(w, x) "smlald %Q[all], %R[all], " w ", " x

/* Add two words of 4 bits to sums of rows: of the first, the first two, the third, and all, as
 * digits of 4 bits. In assembly, because compilers load one word at a time. */
QG_INLINE void qg_block4(const uint32_t **w, const qg_word **x, uint32_t mask, uint32_t *a,
                         uint32_t *ab, uint32_t *c, uint32_t *all) {
    uint32_t x0, x1, w0, w1, t;
    __asm volatile(
        "ldrd %[x0], %[x1], [%[x]], #8\n\t"
        "ldrd %[w0], %[w1], [%[w]], #8\n\t" QG_WORD4("%[w0]", "%[x0]", QG_ALL32) "\n\t" QG_WORD4(
            "%[w1]", "%[x1]", QG_ALL32)
        : [w] "+r"(*w), [x] "+r"(*x), [a] "+r"(*a), [ab] "+r"(*ab), [c] "+r"(*c), [all] "+r"(*all),
          [x0] "=&r"(x0), [x1] "=&r"(x1), [w0] "=&r"(w0), [w1] "=&r"(w1), [t] "=&r"(t)
        : [m] "r"(mask)
        : "memory");
}

/* The same where the sum of all needs 64 bits. */
QG_INLINE void qg_block4_64(const uint32_t **w, const qg_word **x, uint32_t mask, uint32_t *a,
                            uint32_t *ab, uint32_t *c, int64_t *all) {
    uint32_t x0, x1, w0, w1, t;
    __asm volatile(
        "ldrd %[x0], %[x1], [%[x]], #8\n\t"
        "ldrd %[w0], %[w1], [%[w]], #8\n\t" QG_WORD4("%[w0]", "%[x0]", QG_ALL64) "\n\t" QG_WORD4(
            "%[w1]", "%[x1]", QG_ALL64)
        : [w] "+r"(*w), [x] "+r"(*x), [a] "+r"(*a), [ab] "+r"(*ab), [c] "+r"(*c), [all] "+r"(*all),
          [x0] "=&r"(x0), [x1] "=&r"(x1), [w0] "=&r"(w0), [w1] "=&r"(w1), [t] "=&r"(t)
        : [m] "r"(mask)
        : "memory");
}

#endif

QG_INLINE void qg_product_words(const qg_rows *p, int bits, const uint32_t *w, const int32_t *bias,
                                int rows, int K, int16_t *x, qg_value *out) {
    const int pairs = 4 / bits, words = (K + 2 * pairs - 1) / (2 * pairs);
    const uint32_t ones = (1u << bits) - 1u, mask = ones | ones << 16;
    uint32_t x_half = 0;
    int c, i, k, r;
    for (i = K; i < 2 * pairs * words; ++i) x[i] = 0;
#if defined(QG_DUAL)
#pragma GCC unroll 4
    for (i = 0; i < pairs * words; ++i) x_half = qg_dual(((const qg_word *)x)[i], 0x10001, x_half);
#else
    for (i = 0; i < K; ++i) {
        const int32_t each = x[i];
        x_half += (uint32_t)each;
    }
#endif
    x_half <<= bits - 1;
    for (c = 0; c < rows; c += 4) {
        const int16_t *v = x;
        uint32_t sums[4] = {0, 0, 0, 0};
#if defined(QG_DUAL)
        if (bits == 4 && p->pairs != 64) {
            const qg_word *next = (const qg_word *)x;
            uint32_t a = 0, ab = 0, all = 0, third = 0;
            int64_t all64 = 0;
#pragma GCC unroll 16
            for (i = 0; i < words / 2; ++i) {
                if (p->pairs == 32)
                    qg_block4(&w, &next, mask, &a, &ab, &third, &all);
                else
                    qg_block4_64(&w, &next, mask, &a, &ab, &third, &all64);
            }
            if (words % 2) {
                const uint32_t word = *w++;
                a = qg_dual(word & mask, *next, a);
                ab = qg_dual(word & 0x00FF00FFu, *next, ab);
                third = qg_dual(word >> 8 & mask, *next, third);
                all = qg_dual(word, *next, all);
                if (p->pairs != 32) all64 = __smlald((int16x2_t)word, (int16x2_t)*next, all64);
            }
            sums[0] = a - x_half;
            sums[1] = (uint32_t)((int32_t)(ab - a) >> 4) - x_half;
            sums[2] = third - x_half;
            if (p->pairs == 32)
                sums[3] = (uint32_t)((int32_t)(all - ab - (third << 8)) >> 12);
            else
                sums[3] = (uint32_t)((all64 - (int32_t)ab - (int64_t)(int32_t)third * 256) >> 12);
            qg_finish_rows(p, bias, rows, c, sums, out);
            continue;
        }
#pragma GCC unroll 8
#endif
        for (i = 0; i < words; ++i) {
            const uint32_t word = bits == 4 ? *w++ ^ 0x80008000u : *w++;
#pragma GCC unroll 4
            for (k = 0; k < pairs; ++k, v += 2) {
#pragma GCC unroll 4
                for (r = 0; r < 4; ++r) {
                    const uint32_t codes = word >> (4 * k + r) * bits & mask;
#if defined(QG_DUAL)
                    sums[r] = qg_dual(codes, *(const qg_word *)v, sums[r]);
#else
                    sums[r] += (uint32_t)((int32_t)(codes & 0xFFFFu) * v[0] +
                                          (int32_t)(codes >> 16) * v[1]);
#endif
                }
            }
        }
        for (r = 0; r < 4; ++r) sums[r] -= x_half;
        qg_finish_rows(p, bias, rows, c, sums, out);
    }
}

typedef uint32_t qg_weights4;
typedef uint32_t qg_weights2;
typedef uint32_t qg_weights1;

QG_INLINE void qg_product_1(const qg_rows *p, const qg_weights1 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    (void)planes;
    qg_product_words(p, 1, w, bias, rows, K, x, out);
}

QG_INLINE void qg_product_2(const qg_rows *p, const qg_weights2 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    (void)planes;
    qg_product_words(p, 2, w, bias, rows, K, x, out);
}

QG_INLINE void qg_product_4(const qg_rows *p, const qg_weights4 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    (void)planes;
    qg_product_words(p, 4, w, bias, rows, K, x, out);
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
