/* Products of a matrix and a vector, each row requantized to a code.
 *
 * There is one loop in portable C for each width, one for the dual 16-bit multiplies of Cortex-M4,
 * M7 and M33, and one for Helium (Cortex-M55 and M85). gru_arithmetic.h chooses.
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

/* Weights in tiles of 16 columns and of 4 rows, or of 3 rows where the operand has two bytes. */
typedef int8_t qg_weights8;

/* Requantize sums without bias, in place. */
QG_INLINE void qg_requantize_all(const qg_rows *p, const int32_t *bias, int rows, qg_value *out) {
    const int vectors = p->bits == 32 || p->bits == 33 ? rows / 4 * 4 : 0;
    int c;
    for (c = 0; c < vectors; c += 4) {
        const int32x4_t M = p->M ? vdupq_n_s32(p->M) : vldrwq_s32(p->Ms + c);
        int32x4_t v = vaddq_s32(vldrwq_s32(out + c), vldrwq_s32(bias + c));
        if (p->bits == 32) {
            if (p->M != 1) v = vmulq_s32(v, M);
            v = qg_code32_x4(v, p->k, p->zero, p->lo, p->hi);
        } else {
            v = qg_code_high_x4(v, M, p->k, p->zero, p->lo, p->hi);
        }
        vstrwq_s32(out + c, v);
    }
    for (c = vectors; c < rows; ++c)
        out[c] = qg_requantize(p, c, (int32_t)((uint32_t)out[c] + (uint32_t)bias[c]));
}

/* Write bytes of the operand: itself, or blocks of 16 low bytes less 128 and 16 high bytes. Zeros
 * follow up to a whole vector. */
QG_INLINE void qg_split(const int16_t *x, int K, int bytes, int8_t *to) {
    const int vectors = (K + 15) / 16;
    int i;
    for (i = 0; i < vectors; ++i, x += 16, to += 16 * bytes) {
        if (bytes == 1) {
            vstrbq_s16(to, vldrhq_s16(x));
            vstrbq_s16(to + 8, vldrhq_s16(x + 8));
        } else {
            const uint8x16x2_t halves = vld2q_u8((const uint8_t *)x);
            vstrbq_u8((uint8_t *)to, veorq_u8(halves.val[0], vdupq_n_u8(0x80)));
            vstrbq_u8((uint8_t *)to + 16, halves.val[1]);
        }
    }
    for (i = 0; K % 16 != 0 && i < 16 - K % 16; ++i) to[-1 - i] = 0;
    for (i = 0; bytes == 2 && K % 16 != 0 && i < 16 - K % 16; ++i) to[-17 - i] = 0;
}

/* Sums of products of 4 rows, with operands of one byte; returns the weights of the next rows. In
 * assembly, because compilers spend as many instructions on addresses. */
QG_INLINE const int8_t *qg_sums_x1(const int8_t *w, int K, const int8_t *v, int32_t *out) {
    int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    __asm volatile(
        "dls lr, %[n]\n"
        "1:\n\t"
        "vldrb.8 q0, [%[v]], #16\n\t"
        "vldrb.8 q1, [%[w]], #16\n\t"
        "vldrb.8 q2, [%[w]], #16\n\t"
        "vmladava.s8 %[s0], q0, q1\n\t"
        "vldrb.8 q1, [%[w]], #16\n\t"
        "vmladava.s8 %[s1], q0, q2\n\t"
        "vldrb.8 q2, [%[w]], #16\n\t"
        "vmladava.s8 %[s2], q0, q1\n\t"
        "vmladava.s8 %[s3], q0, q2\n\t"
        "le lr, 1b\n\t"
        : [v] "+r"(v), [w] "+r"(w), [s0] "+Te"(s0), [s1] "+Te"(s1), [s2] "+Te"(s2), [s3] "+Te"(s3)
        : [n] "r"((K + 15) / 16)
        : "lr", "q0", "q1", "q2", "memory");
    out[0] = s0;
    out[1] = s1;
    out[2] = s2;
    out[3] = s3;
    return w;
}

/* The same for 3 rows, with operands of two bytes. */
QG_INLINE const int8_t *qg_sums_x2(const int8_t *w, int K, const int8_t *v, int32_t *out) {
    int32_t l0 = 0, l1 = 0, l2 = 0, h0 = 0, h1 = 0, h2 = 0;
    __asm volatile(
        "dls lr, %[n]\n"
        "1:\n\t"
        "vldrb.8 q0, [%[v]], #16\n\t"
        "vldrb.8 q1, [%[v]], #16\n\t"
        "vldrb.8 q2, [%[w]], #16\n\t"
        "vmladava.s8 %[l0], q0, q2\n\t"
        "vldrb.8 q3, [%[w]], #16\n\t"
        "vmladava.s8 %[h0], q1, q2\n\t"
        "vmladava.s8 %[l1], q0, q3\n\t"
        "vldrb.8 q2, [%[w]], #16\n\t"
        "vmladava.s8 %[h1], q1, q3\n\t"
        "vmladava.s8 %[l2], q0, q2\n\t"
        "vmladava.s8 %[h2], q1, q2\n\t"
        "le lr, 1b\n\t"
        : [v] "+r"(v), [w] "+r"(w), [l0] "+Te"(l0), [l1] "+Te"(l1), [l2] "+Te"(l2), [h0] "+Te"(h0),
          [h1] "+Te"(h1), [h2] "+Te"(h2)
        : [n] "r"((K + 15) / 16)
        : "lr", "q0", "q1", "q2", "q3", "memory");
    out[0] = (int32_t)((uint32_t)h0 * 256 + (uint32_t)l0);
    out[1] = (int32_t)((uint32_t)h1 * 256 + (uint32_t)l1);
    out[2] = (int32_t)((uint32_t)h2 * 256 + (uint32_t)l2);
    return w;
}

/* `rows` is a multiple of 3: those of three gates. */
QG_INLINE void qg_product_8(const qg_rows *p, const qg_weights8 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    int c;
    qg_split(x, K, p->bytes, planes);
    for (c = 0; p->bytes == 1 && c < rows / 4 * 4; c += 4) w = qg_sums_x1(w, K, planes, out + c);
    if (p->bytes == 1 && rows % 4 != 0) {
        int32_t sums[4];
        qg_sums_x1(w, K, planes, sums);
        for (c = rows / 4 * 4; c < rows; ++c) out[c] = sums[c % 4];
    }
    for (c = 0; p->bytes == 2 && c < rows; c += 3) w = qg_sums_x2(w, K, planes, out + c);
    qg_requantize_all(p, bias, rows, out);
}

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
