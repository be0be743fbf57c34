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

/* Weights of 4 rows after those of the 4 rows before: tiles of 16 columns, then one of 8 columns if
 * 1 to 8 columns are left. */
typedef int8_t qg_weights8;

/* Requantize sums in place. */
QG_INLINE void qg_requantize_all(const qg_rows *p, int rows, qg_value *out) {
    const int vectors = p->bits == 32 || p->bits == 33 ? rows / 4 * 4 : 0;
    int c;
#pragma GCC unroll 4
    for (c = 0; c < vectors; c += 4) {
        const int32x4_t M = p->M ? vdupq_n_s32(p->M) : vldrwq_s32(p->Ms + c);
        int32x4_t v = vldrwq_s32(out + c);
        if (p->bits == 32) {
            if (p->M != 1) v = vmulq_s32(v, M);
            v = qg_code32_x4(v, p->k, p->zero, p->lo, p->hi);
        } else {
            v = qg_code_high_x4(v, M, p->k, p->zero, p->lo, p->hi);
        }
        vstrwq_s32(out + c, v);
    }
    for (c = vectors; c < rows; ++c) out[c] = qg_requantize(p, c, out[c]);
}

/* Write bytes of the first 16 * `tiles` elements of the operand: themselves, or blocks of 16 low
 * bytes less 128 and 16 high bytes. */
QG_INLINE void qg_split(const int16_t *x, int tiles, int bytes, int8_t *to) {
    int i;
#pragma GCC unroll 16
    for (i = 0; i < tiles; ++i, x += 16, to += 16 * bytes) {
        if (bytes == 1) {
            vstrbq_s16(to, vldrhq_s16(x));
            vstrbq_s16(to + 8, vldrhq_s16(x + 8));
        } else {
            const uint8x16x2_t halves = vld2q_u8((const uint8_t *)x);
            vstrbq_u8((uint8_t *)to, veorq_u8(halves.val[0], vdupq_n_u8(0x80)));
            vstrbq_u8((uint8_t *)to + 16, halves.val[1]);
        }
    }
}

/* Sums of products of 4 rows are in l0 to l3. Where the operand has two bytes, these are sums of
 * low bytes, and h0 to h3 are sums of high bytes. The instructions need even registers. */
#define QG_SUMS_LOW register int32_t l0 __asm("r0"), l1 __asm("r2"), l2 __asm("r4"), l3 __asm("r6")
#define QG_SUMS_HIGH \
    register int32_t h0 __asm("r8"), h1 __asm("r10"), h2 __asm("r12"), h3 __asm("r14")
#define QG_LOW(MODE) [l0] MODE(l0), [l1] MODE(l1), [l2] MODE(l2), [l3] MODE(l3)
#define QG_HIGH(MODE) [h0] MODE(h0), [h1] MODE(h1), [h2] MODE(h2), [h3] MODE(h3)

/* Multiply the weights of a tile by the bytes of the operand. In assembly, because compilers spend
 * as many instructions on addresses. */
#define QG_TILE_X1(w, x)                                                   \
    do {                                                                   \
        int8x16_t qg_a, qg_b;                                              \
        __asm(                                                             \
            "vldrb.8 %q[a], [%[p]], #16\n\t"                               \
            "vldrb.8 %q[b], [%[p]], #16\n\t"                               \
            "vmladava.s8 %[l0], %q[v], %q[a]\n\t"                          \
            "vldrb.8 %q[a], [%[p]], #16\n\t"                               \
            "vmladava.s8 %[l1], %q[v], %q[b]\n\t"                          \
            "vldrb.8 %q[b], [%[p]], #16\n\t"                               \
            "vmladava.s8 %[l2], %q[v], %q[a]\n\t"                          \
            "vmladava.s8 %[l3], %q[v], %q[b]"                              \
            : [p] "+r"(w), [a] "=&w"(qg_a), [b] "=&w"(qg_b), QG_LOW("+Te") \
            : [v] "w"(x), "m"(*(const int8_t (*)[64])w));                  \
    } while (0)

/* The same for two bytes. `OP` is the instruction for high bytes. */
#define QG_TILE_X2(OP, MODE, w, low, high)                                                \
    do {                                                                                  \
        int8x16_t qg_a, qg_b;                                                             \
        __asm(                                                                            \
            "vldrb.8 %q[a], [%[p]], #16\n\t"                                              \
            "vmladava.s8 %[l0], %q[u], %q[a]\n\t"                                         \
            "vldrb.8 %q[b], [%[p]], #16\n\t" OP                                           \
            ".s8 %[h0], %q[v], %q[a]\n\t"                                                 \
            "vmladava.s8 %[l1], %q[u], %q[b]\n\t"                                         \
            "vldrb.8 %q[a], [%[p]], #16\n\t" OP                                           \
            ".s8 %[h1], %q[v], %q[b]\n\t"                                                 \
            "vmladava.s8 %[l2], %q[u], %q[a]\n\t"                                         \
            "vldrb.8 %q[b], [%[p]], #16\n\t" OP                                           \
            ".s8 %[h2], %q[v], %q[a]\n\t"                                                 \
            "vmladava.s8 %[l3], %q[u], %q[b]\n\t" OP ".s8 %[h3], %q[v], %q[b]"            \
            : [p] "+r"(w), [a] "=&w"(qg_a), [b] "=&w"(qg_b), QG_LOW("+Te"), QG_HIGH(MODE) \
            : [u] "w"(low), [v] "w"(high), "m"(*(const int8_t (*)[64])w));                \
    } while (0)

/* Add the products of the last 8 columns. Weights are widened, as the operand has 16 bits here.
 * These loads need a pointer in a low register. */
#define QG_LAST(w, x)                                                      \
    do {                                                                   \
        int16x8_t qg_a, qg_b;                                              \
        __asm(                                                             \
            "vldrb.s16 %q[a], [%[p]], #8\n\t"                              \
            "vldrb.s16 %q[b], [%[p]], #8\n\t"                              \
            "vmladava.s16 %[l0], %q[v], %q[a]\n\t"                         \
            "vldrb.s16 %q[a], [%[p]], #8\n\t"                              \
            "vmladava.s16 %[l1], %q[v], %q[b]\n\t"                         \
            "vldrb.s16 %q[b], [%[p]], #8\n\t"                              \
            "vmladava.s16 %[l2], %q[v], %q[a]\n\t"                         \
            "vmladava.s16 %[l3], %q[v], %q[b]"                             \
            : [p] "+l"(w), [a] "=&w"(qg_a), [b] "=&w"(qg_b), QG_LOW("+Te") \
            : [v] "w"(x), "m"(*(const int8_t (*)[32])w));                  \
    } while (0)

/* Load 16 bytes of the operand that are not in registers. */
#define QG_NEXT(vector, planes)                \
    __asm("vldrb.8 %q[v], [%[p]], #16"         \
          : [v] "=w"(vector), [p] "+r"(planes) \
          : "m"(*(const int8_t (*)[16])planes))

/* Begin with the biases of 4 rows. */
#define QG_LOAD_BIASES(bias)                           \
    __asm("ldm %[from]!, {%[l0], %[l1], %[l2], %[l3]}" \
          : [from] "+r"(bias), QG_LOW("=&r")           \
          : "m"(*(const int32_t (*)[4])bias))

#define QG_STORE_SUMS(out)                             \
    __asm("stm %[to]!, {%[l0], %[l1], %[l2], %[l3]}"   \
          : [to] "+r"(out), "=m"(*(int32_t (*)[4])out) \
          : QG_LOW("r"))

/* The part of an operand that stays in registers. */
typedef struct {
    int8x16_t v0, v1, v2, v3; /* 4 tiles of one byte, or low and high bytes of 2 tiles */
    int16x8_t end;            /* last 8 elements */
} qg_operand;

QG_INLINE qg_operand qg_load_operand(const int8_t *planes, int blocks, int last,
                                     const int16_t *end) {
    qg_operand x;
    x.v0 = blocks > 0 ? vldrbq_s8(planes) : vdupq_n_s8(0);
    x.v1 = blocks > 1 ? vldrbq_s8(planes + 16) : x.v0;
    x.v2 = blocks > 2 ? vldrbq_s8(planes + 32) : x.v0;
    x.v3 = blocks > 3 ? vldrbq_s8(planes + 48) : x.v0;
    x.end = last ? vldrhq_s16(end) : vdupq_n_s16(0);
    return x;
}

/* Write the sums of 4 rows with their biases, and move the pointers beyond them. Operands of one
 * byte; `planes` are those that are not in registers. */
QG_INLINE void qg_sums_x1(const int8_t **weights, const int32_t **bias, const qg_operand *x,
                          int tiles, int last, const int8_t *planes, qg_value **out) {
    const int8_t *w = *weights;
    const int32_t *from = *bias;
    int32_t *to = *out;
    int i;
    QG_SUMS_LOW;
    QG_LOAD_BIASES(from);
    if (tiles > 0) QG_TILE_X1(w, x->v0);
    if (tiles > 1) QG_TILE_X1(w, x->v1);
    if (tiles > 2) QG_TILE_X1(w, x->v2);
    if (tiles > 3) QG_TILE_X1(w, x->v3);
#pragma GCC unroll 16
    for (i = 4; i < tiles; ++i) {
        int8x16_t v;
        QG_NEXT(v, planes);
        QG_TILE_X1(w, v);
    }
    if (last) QG_LAST(w, x->end);
    QG_STORE_SUMS(to);
    *weights = w;
    *bias = from;
    *out = to;
}

/* The same with operands of two bytes. */
QG_INLINE void qg_sums_x2(const int8_t **weights, const int32_t **bias, const qg_operand *x,
                          int tiles, int last, const int8_t *planes, qg_value **out) {
    const int8_t *w = *weights;
    const int32_t *from = *bias;
    int32_t *to = *out;
    int i;
    QG_SUMS_LOW;
    QG_SUMS_HIGH;
    QG_LOAD_BIASES(from);
    if (tiles > 0)
        QG_TILE_X2("vmladav", "=&Te", w, x->v0, x->v1);
    else
        h0 = h1 = h2 = h3 = 0;
    if (tiles > 1) QG_TILE_X2("vmladava", "+Te", w, x->v2, x->v3);
#pragma GCC unroll 16
    for (i = 2; i < tiles; ++i) {
        int8x16_t low, high;
        QG_NEXT(low, planes);
        QG_NEXT(high, planes);
        QG_TILE_X2("vmladava", "+Te", w, low, high);
    }
    if (last) QG_LAST(w, x->end);
    __asm(
        "add %[l0], %[l0], %[h0], lsl #8\n\t"
        "add %[l1], %[l1], %[h1], lsl #8\n\t"
        "add %[l2], %[l2], %[h2], lsl #8\n\t"
        "add %[l3], %[l3], %[h3], lsl #8"
        : QG_LOW("+r")
        : QG_HIGH("r"));
    QG_STORE_SUMS(to);
    *weights = w;
    *bias = from;
    *out = to;
}

/* `rows` is that of three gates. */
QG_INLINE void qg_product_8(const qg_rows *p, const qg_weights8 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    const int tiles = (K + 7) / 16, last = K - 16 * tiles > 0;
    const int columns = 16 * tiles + 8 * last;
    qg_value *to = out, *const end = out + rows / 4 * 4;
    qg_operand operand;
    int i;
    for (i = K; i < columns; ++i) x[i] = 0;
    qg_split(x, tiles, p->bytes, planes);
    operand = qg_load_operand(planes, tiles * p->bytes, last, x + 16 * tiles);
    while (to != end) {
        if (p->bytes == 1)
            qg_sums_x1(&w, &bias, &operand, tiles, last, planes + 64, &to);
        else
            qg_sums_x2(&w, &bias, &operand, tiles, last, planes + 64, &to);
    }
    if (rows % 4 != 0) {
        qg_value sums[4], *more = sums;
        if (p->bytes == 1)
            qg_sums_x1(&w, &bias, &operand, tiles, last, planes + 64, &more);
        else
            qg_sums_x2(&w, &bias, &operand, tiles, last, planes + 64, &more);
        for (i = 0; i < rows % 4; ++i) to[i] = sums[i];
    }
    qg_requantize_all(p, rows, out);
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
