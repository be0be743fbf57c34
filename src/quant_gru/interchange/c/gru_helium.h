/* Helium of Cortex-M55 and M85: requantization and tables of four values, and products of 8-bit
 * weights. Functions for four values have the names of those in gru_arithmetic.h and _x4.
 */
#ifndef QUANT_GRU_HELIUM_H
#define QUANT_GRU_HELIUM_H

#include <arm_mve.h>

#include "gru_arithmetic.h"

/* A switch whose cases give `F` a literal shift, as its instructions need it. One case is left
 * where the compiler knows the shift. */
/* clang-format off */
#define QG_CASE(F, k) case k: return F(k);
#define QG_CASES_16(F) \
    QG_CASE(F, 1) QG_CASE(F, 2) QG_CASE(F, 3) QG_CASE(F, 4) QG_CASE(F, 5) QG_CASE(F, 6) \
    QG_CASE(F, 7) QG_CASE(F, 8) QG_CASE(F, 9) QG_CASE(F, 10) QG_CASE(F, 11) QG_CASE(F, 12) \
    QG_CASE(F, 13) QG_CASE(F, 14) QG_CASE(F, 15) QG_CASE(F, 16)
#define QG_CASES_31(F) \
    QG_CASES_16(F) QG_CASE(F, 17) QG_CASE(F, 18) QG_CASE(F, 19) QG_CASE(F, 20) QG_CASE(F, 21) \
    QG_CASE(F, 22) QG_CASE(F, 23) QG_CASE(F, 24) QG_CASE(F, 25) QG_CASE(F, 26) QG_CASE(F, 27) \
    QG_CASE(F, 28) QG_CASE(F, 29) QG_CASE(F, 30) QG_CASE(F, 31)
/* clang-format on */

/* v >> k for k from 0 to 31 */
QG_INLINE int32x4_t qg_right_x4(int32x4_t v, int k) {
#define QG_SHIFT(k) vshrq_n_s32(v, k)
    switch (k) { QG_CASES_31(QG_SHIFT) default : return v; }
#undef QG_SHIFT
}

/* floor(v / 2^k + 1/2) for k from 0 to 31, without overflow on the way */
QG_INLINE int32x4_t qg_half_up_x4(int32x4_t v, int k) {
#define QG_SHIFT(k) vrshrq_n_s32(v, k)
    switch (k) { QG_CASES_31(QG_SHIFT) default : return v; }
#undef QG_SHIFT
}

/* The same, saturated to 16 bits, for k from 1 to 16. In assembly, because the intrinsics copy. The
 * shifts round, as GNU as 2.40 gives vqshrn and vqshrun the encoding of vqrshrn and vqrshrun. */
QG_INLINE int32x4_t qg_half_up_s16_x4(int32x4_t v, int k) {
    int16x8_t low;
#define QG_SHIFT(k)                                                \
    __extension__({                                                \
        __asm("vqrshrnb.s32 %q0, %q1, #" #k : "=w"(low) : "w"(v)); \
        vmovlbq_s16(low);                                          \
    })
    switch (k) { QG_CASES_16(QG_SHIFT) default : return v; }
#undef QG_SHIFT
}

QG_INLINE int32x4_t qg_half_up_u16_x4(int32x4_t v, int k) {
    uint16x8_t low;
#define QG_SHIFT(k)                                                 \
    __extension__({                                                 \
        __asm("vqrshrunb.s32 %q0, %q1, #" #k : "=w"(low) : "w"(v)); \
        vreinterpretq_s32_u32(vmovlbq_u16(low));                    \
    })
    switch (k) { QG_CASES_16(QG_SHIFT) default : return v; }
#undef QG_SHIFT
}

QG_INLINE int32x4_t qg_saturate_s16_x4(int32x4_t v) {
    int16x8_t low;
    __asm("vqmovnb.s32 %q0, %q1" : "=w"(low) : "w"(v));
    return vmovlbq_s16(low);
}

QG_INLINE int32x4_t qg_clamp_x4(int32x4_t v, int64_t lo, int64_t hi) {
    return vminq_s32(vmaxq_s32(v, vdupq_n_s32((int32_t)lo)), vdupq_n_s32((int32_t)hi));
}

/* clamp(floor(v / 2^k + 1/2), lo, hi) */
QG_INLINE int32x4_t qg_half_up_clamp_x4(int32x4_t v, int k, int64_t lo, int64_t hi) {
    if (k == 0 && lo == -32768 && hi == 32767) return qg_saturate_s16_x4(v);
    if (1 <= k && k <= 16 && lo == -32768 && hi == 32767) return qg_half_up_s16_x4(v, k);
    if (1 <= k && k <= 16 && lo == 0 && hi == 65535) return qg_half_up_u16_x4(v, k);
    return qg_clamp_x4(qg_half_up_x4(v, k), lo, hi);
}

/* qg_code32: 1 less where the quotient is even, so that ties there go down. */
QG_INLINE int32x4_t qg_code32_x4(int32x4_t v, int k, int64_t zero, int64_t lo, int64_t hi) {
    const int32_t add = (int32_t)zero * (int32_t)(1u << k);
    if (k) {
        const int32x4_t even = vbicq_s32(vdupq_n_s32(1), qg_right_x4(v, k));
        v = vsubq_s32(v, even);
    }
    if (add) v = vaddq_n_s32(v, add);
    return qg_half_up_clamp_x4(v, k, lo, hi);
}

/* qg_code_high */
QG_INLINE int32x4_t qg_code_high_x4(int32x4_t a, int32x4_t M, int k, int64_t zero, int64_t lo,
                                    int64_t hi) {
    /* v + 2^(k-1) - 1 + (quotient & 1): the low word carries unless it and the last bit are 0 */
    const int32_t add = (int32_t)zero * (int32_t)(1u << (k - 32)) - 1;
    const int32x4_t one = vdupq_n_s32(1), high = vmulhq_s32(a, M);
    const int32x4_t odd = vandq_s32(qg_right_x4(high, k - 32), one);
    const uint32x4_t rest = vreinterpretq_u32_s32(vorrq_s32(vmulq_s32(a, M), odd));
    const int32x4_t carry = vreinterpretq_s32_u32(vminq_u32(rest, vreinterpretq_u32_s32(one)));
    const int32x4_t sum = vaddq_s32(vaddq_n_s32(high, add), carry);
    return qg_half_up_clamp_x4(sum, k - 32, lo, hi);
}

/* A sum of bits 32; each term is a code or a product. */
QG_INLINE int32x4_t qg_apply_x4(const qg_sum *s, int32x4_t t1, int32x4_t t2) {
    const int64_t add = s->M1 * s->z1 + s->M2 * s->z2;
    int32x4_t v = t1;
    if (s->M1 == 1 && s->M2 == 1)
        v = vaddq_s32(t1, t2);
    else if (s->M1 == 1 && s->M2)
        v = vmlaq_n_s32(t1, t2, (int32_t)s->M2);
    else if (s->M2 == 1)
        v = vmlaq_n_s32(t2, t1, (int32_t)s->M1);
    else if (s->M1 != 1) {
        v = vmulq_n_s32(t1, (int32_t)s->M1);
        if (s->M2) v = vmlaq_n_s32(v, t2, (int32_t)s->M2);
    }
    if (add) v = vsubq_n_s32(v, (int32_t)add);
    return qg_code32_x4(v, s->k, s->zero, s->lo, s->hi);
}

/* A product with a code of its own, of bits 32 or 33. */
QG_INLINE int32x4_t qg_product_x4(const qg_sum *s, int32x4_t a, int32x4_t b) {
    if (s->bits == 32) return qg_apply_x4(s, vmulq_s32(a, b), a);
    if (s->M1 != 1) a = vmulq_n_s32(a, (int32_t)s->M1);
    if (s->M2 != 1) b = vmulq_n_s32(b, (int32_t)s->M2);
    return qg_code_high_x4(a, b, s->k, s->zero, s->lo, s->hi);
}

QG_INLINE int32x4_t qg_look_up_block_x4(const qg_block_table *t, int32x4_t code) {
    const uint32x4_t i = vreinterpretq_u32_s32(vsubq_n_s32(code, t->first));
    const uint32x4_t block = vshlq_r_u32(i, -t->u);
    const uint32x4_t start = vldrhq_gather_shifted_offset_u32(t->starts, block);
    const uint32x4_t pair = vldrbq_gather_offset_u32(t->rests, vshrq_n_u32(i, 1));
    const uint32x4_t odd = vandq_u32(i, vdupq_n_u32(1));
    const int32x4_t right = vnegq_s32(vreinterpretq_s32_u32(vshlq_n_u32(odd, 2)));
    const uint32x4_t rest = vandq_u32(vshlq_u32(pair, right), vdupq_n_u32(15));
    return vaddq_n_s32(vreinterpretq_s32_u32(vaddq_u32(start, rest)), t->lo);
}

QG_INLINE int32x4_t qg_look_up_short_x4(const qg_short_table *t, int32x4_t code) {
    const int32x4_t q = vsubq_n_s32(code, t->first);
    const int32x4_t segment = qg_right_x4(q, t->u);
    const int32x4_t d = vmlaq_n_s32(q, segment, -(1 << t->u));
    const uint32x4_t at = vreinterpretq_u32_s32(vmulq_n_s32(segment, 3));
    const int32x4_t c1 =
        vldrwq_gather_shifted_offset_s32(t->slopes, vreinterpretq_u32_s32(segment));
    const int32x4_t c2 =
        vldrhq_gather_shifted_offset_s32((const int16_t *)(const void *)(t->starts + 2), at);
    const int32x4_t start = vreinterpretq_s32_u32(vldrhq_gather_shifted_offset_u32(t->starts, at));
    const int32x4_t rest =
        vreinterpretq_s32_u32(vldrhq_gather_shifted_offset_u32(t->starts + 1, at));
    const int32x4_t slope = vaddq_s32(c1, qg_right_x4(vmulq_s32(c2, d), t->e));
    const int32x4_t sum = vaddq_s32(vshlq_r_s32(rest, t->s), vmulq_s32(slope, d));
    const int32x4_t v = vaddq_s32(vaddq_n_s32(start, t->lo), qg_right_x4(sum, t->g));
    return vminq_s32(vmaxq_s32(v, vdupq_n_s32(t->lo)), vdupq_n_s32(t->hi));
}

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
#pragma GCC unroll 64
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
#pragma GCC unroll 64
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
    const int columns = 16 * tiles + 8 * last, blocks = tiles * p->bytes;
    const int8_t *const beyond = blocks > 4 ? planes + 64 : planes;
    qg_value *to = out, *const end = out + rows / 4 * 4;
    qg_operand operand;
    int i;
    for (i = K; i < columns; ++i) x[i] = 0;
    qg_split(x, tiles, p->bytes, planes);
    operand = qg_load_operand(planes, blocks, last, x + 16 * tiles);
    while (to != end) {
        if (p->bytes == 1)
            qg_sums_x1(&w, &bias, &operand, tiles, last, beyond, &to);
        else
            qg_sums_x2(&w, &bias, &operand, tiles, last, beyond, &to);
    }
    if (rows % 4 != 0) {
        qg_value sums[4], *more = sums;
        if (p->bytes == 1)
            qg_sums_x1(&w, &bias, &operand, tiles, last, beyond, &more);
        else
            qg_sums_x2(&w, &bias, &operand, tiles, last, beyond, &more);
        for (i = 0; i < rows % 4; ++i) to[i] = sums[i];
    }
    qg_requantize_all(p, rows, out);
}

/* Weights of 4 bits in the tiles of those of 8 bits, two rows in a byte: 8 more than the code of
 * the first row, and the code of the second one in the higher bits. A sum of products of bytes is
 * 16 times that of the second row, plus that of the lower bits. */
typedef int8_t qg_weights4;

/* Multiply the bytes, and their lower bits, of two rows. */
#define QG_NIBBLES_X1(w, x, mask, A, B)                                                       \
    do {                                                                                      \
        int8x16_t qg_a, qg_t;                                                                 \
        __asm(                                                                                \
            "vldrb.8 %q[a], [%[p]], #16\n\t"                                                  \
            "vand %q[t], %q[a], %q[m]\n\t"                                                    \
            "vmladava.s8 %[to_B], %q[v], %q[a]\n\t"                                           \
            "vmladava.s8 %[to_A], %q[v], %q[t]"                                               \
            : [p] "+r"(w), [a] "=&w"(qg_a), [t] "=&w"(qg_t), [to_A] "+Te"(A), [to_B] "+Te"(B) \
            : [v] "w"(x), [m] "w"(mask), "m"(*(const int8_t (*)[16])w));                      \
    } while (0)

#define QG_NIBBLES_X2(OP, MODE, w, low, high, mask, A, B, hA, hB)                              \
    do {                                                                                       \
        int8x16_t qg_a, qg_t;                                                                  \
        __asm(                                                                                 \
            "vldrb.8 %q[a], [%[p]], #16\n\t"                                                   \
            "vand %q[t], %q[a], %q[m]\n\t"                                                     \
            "vmladava.s8 %[to_B], %q[u], %q[a]\n\t" OP                                         \
            ".s8 %[to_hB], %q[v], %q[a]\n\t"                                                   \
            "vmladava.s8 %[to_A], %q[u], %q[t]\n\t" OP ".s8 %[to_hA], %q[v], %q[t]"            \
            : [p] "+r"(w), [a] "=&w"(qg_a), [t] "=&w"(qg_t), [to_A] "+Te"(A), [to_B] "+Te"(B), \
              [to_hA] MODE(hA), [to_hB] MODE(hB)                                               \
            : [u] "w"(low), [v] "w"(high), [m] "w"(mask), "m"(*(const int8_t (*)[16])w));      \
    } while (0)

#define QG_NIBBLES_LAST(w, x, A, B)                                                           \
    do {                                                                                      \
        int16x8_t qg_a, qg_t;                                                                 \
        __asm(                                                                                \
            "vldrb.s16 %q[a], [%[p]], #8\n\t"                                                 \
            "vmov.i16 %q[t], #15\n\t"                                                         \
            "vand %q[t], %q[a], %q[t]\n\t"                                                    \
            "vmladava.s16 %[to_B], %q[v], %q[a]\n\t"                                          \
            "vmladava.s16 %[to_A], %q[v], %q[t]"                                              \
            : [p] "+l"(w), [a] "=&w"(qg_a), [t] "=&w"(qg_t), [to_A] "+Te"(A), [to_B] "+Te"(B) \
            : [v] "w"(x), "m"(*(const int8_t (*)[8])w));                                      \
    } while (0)

/* Write the sums of 4 rows with their biases. `x8` is 8 times the sum of the operand. The second
 * of two biases is 16 times its own, plus the first one. */
#define QG_FINISH_NIBBLES(x8)         \
    __asm(                            \
        "sub %[l1], %[l1], %[l0]\n\t" \
        "sub %[l3], %[l3], %[l2]\n\t" \
        "sub %[l0], %[l0], %[x]\n\t"  \
        "sub %[l2], %[l2], %[x]\n\t"  \
        "asr %[l1], %[l1], #4\n\t"    \
        "asr %[l3], %[l3], #4"        \
        : QG_LOW("+r")                \
        : [x] "r"(x8))

QG_INLINE void qg_nibbles_x1(const int8_t **weights, const int32_t **bias, const qg_operand *x,
                             int tiles, int last, const int8_t *planes, int32_t x8,
                             qg_value **out) {
    const int8x16_t mask = vdupq_n_s8(15);
    const int8_t *w = *weights;
    const int32_t *from = *bias;
    int32_t *to = *out;
    int i;
    QG_SUMS_LOW;
    QG_LOAD_BIASES(from);
#pragma GCC unroll 64
    for (i = 0; i < tiles; ++i) {
        int8x16_t v;
        if (i == 0)
            v = x->v0;
        else if (i == 1)
            v = x->v1;
        else if (i == 2)
            v = x->v2;
        else if (i == 3)
            v = x->v3;
        else
            QG_NEXT(v, planes);
        QG_NIBBLES_X1(w, v, mask, l0, l1);
        QG_NIBBLES_X1(w, v, mask, l2, l3);
    }
    if (last) {
        QG_NIBBLES_LAST(w, x->end, l0, l1);
        QG_NIBBLES_LAST(w, x->end, l2, l3);
    }
    QG_FINISH_NIBBLES(x8);
    QG_STORE_SUMS(to);
    *weights = w;
    *bias = from;
    *out = to;
}

/* The same with operands of two bytes. */
QG_INLINE void qg_nibbles_x2(const int8_t **weights, const int32_t **bias, const qg_operand *x,
                             int tiles, int last, const int8_t *planes, int32_t x8,
                             qg_value **out) {
    const int8x16_t mask = vdupq_n_s8(15);
    const int8_t *w = *weights;
    const int32_t *from = *bias;
    int32_t *to = *out;
    int i;
    QG_SUMS_LOW;
    QG_SUMS_HIGH;
    QG_LOAD_BIASES(from);
    if (tiles > 0) {
        QG_NIBBLES_X2("vmladav", "=&Te", w, x->v0, x->v1, mask, l0, l1, h0, h1);
        QG_NIBBLES_X2("vmladav", "=&Te", w, x->v0, x->v1, mask, l2, l3, h2, h3);
    } else {
        h0 = h1 = h2 = h3 = 0;
    }
#pragma GCC unroll 64
    for (i = 1; i < tiles; ++i) {
        int8x16_t low, high;
        if (i == 1) {
            low = x->v2;
            high = x->v3;
        } else {
            QG_NEXT(low, planes);
            QG_NEXT(high, planes);
        }
        QG_NIBBLES_X2("vmladava", "+Te", w, low, high, mask, l0, l1, h0, h1);
        QG_NIBBLES_X2("vmladava", "+Te", w, low, high, mask, l2, l3, h2, h3);
    }
    if (last) {
        QG_NIBBLES_LAST(w, x->end, l0, l1);
        QG_NIBBLES_LAST(w, x->end, l2, l3);
    }
    __asm(
        "add %[l0], %[l0], %[h0], lsl #8\n\t"
        "add %[l1], %[l1], %[h1], lsl #8\n\t"
        "add %[l2], %[l2], %[h2], lsl #8\n\t"
        "add %[l3], %[l3], %[h3], lsl #8"
        : QG_LOW("+r")
        : QG_HIGH("r"));
    QG_FINISH_NIBBLES(x8);
    QG_STORE_SUMS(to);
    *weights = w;
    *bias = from;
    *out = to;
}

/* The sum of the operand as the planes have it. */
QG_INLINE uint32_t qg_sum_of_operand(const int8_t *planes, int tiles, int bytes, int last,
                                     int16x8_t end) {
    int32_t low = last ? vaddvq_s16(end) : 0, high = 0;
    int i;
#pragma GCC unroll 16
    for (i = 0; i < tiles; ++i) {
        low = vaddvaq_s8(low, vldrbq_s8(planes + 16 * bytes * i));
        if (bytes == 2) high = vaddvaq_s8(high, vldrbq_s8(planes + 32 * i + 16));
    }
    return (uint32_t)low + ((uint32_t)high << 8);
}

/* `rows` is that of three gates. */
QG_INLINE void qg_product_4(const qg_rows *p, const qg_weights4 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    const int tiles = (K + 7) / 16, last = K - 16 * tiles > 0;
    const int columns = 16 * tiles + 8 * last, blocks = tiles * p->bytes;
    const int8_t *const beyond = blocks > 4 ? planes + 64 : planes;
    qg_value *to = out, *const end = out + rows / 4 * 4;
    qg_operand operand;
    int32_t x8;
    int i;
    for (i = K; i < columns; ++i) x[i] = 0;
    qg_split(x, tiles, p->bytes, planes);
    operand = qg_load_operand(planes, blocks, last, x + 16 * tiles);
    x8 = (int32_t)(qg_sum_of_operand(planes, tiles, p->bytes, last, operand.end) << 3);
    while (to != end) {
        if (p->bytes == 1)
            qg_nibbles_x1(&w, &bias, &operand, tiles, last, beyond, x8, &to);
        else
            qg_nibbles_x2(&w, &bias, &operand, tiles, last, beyond, x8, &to);
    }
    if (rows % 4 != 0) {
        qg_value sums[4], *more = sums;
        if (p->bytes == 1)
            qg_nibbles_x1(&w, &bias, &operand, tiles, last, beyond, x8, &more);
        else
            qg_nibbles_x2(&w, &bias, &operand, tiles, last, beyond, x8, &more);
        for (i = 0; i < rows % 4; ++i) to[i] = sums[i];
    }
    qg_requantize_all(p, rows, out);
}

/* Weights of 2 or 1 bits in tiles of 16 columns: the codes of 4 rows of a column are digits of a
 * byte, each larger by half of its range, but for the last one at 2 bits. At 1 bit, the higher half
 * of a byte has the column of the next tile. */
typedef int8_t qg_weights2;
typedef int8_t qg_weights1;

QG_INLINE void qg_product_digits(const qg_rows *p, int bits, const int8_t *w, const int32_t *bias,
                                 int rows, int K, int16_t *x, int8_t *planes, qg_value *out) {
    const int tiles = (K + 7) / 16, last = K - 16 * tiles > 0, columns = 16 * tiles + 8 * last;
    int16x8_t end;
    uint32_t x_half;
    int c, i, r;
    for (i = K; i < columns; ++i) x[i] = 0;
    qg_split(x, tiles, p->bytes, planes);
    end = last ? vldrhq_s16(x + 16 * tiles) : vdupq_n_s16(0);
    x_half = qg_sum_of_operand(planes, tiles, p->bytes, last, end) << (bits - 1);
    for (c = 0; c < rows; c += 4) {
        int32_t low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
        uint32_t before = 0;
        int8x16_t codes = vdupq_n_s8(0);
#pragma GCC unroll 16
        for (i = 0; i < tiles; ++i) {
            const int8_t *const v = planes + 16 * p->bytes * i;
            const int8x16_t v0 = vldrbq_s8(v), v1 = p->bytes == 2 ? vldrbq_s8(v + 16) : v0;
            if (bits == 1 && i % 2) {
                codes = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(codes), 4));
            } else {
                codes = vldrbq_s8(w);
                w += 16;
            }
#pragma GCC unroll 4
            for (r = 0; r < 4; ++r) {
                const int8_t mask = (int8_t)((1 << (r + 1) * bits) - 1);
                const int8x16_t digits = vandq_s8(codes, vdupq_n_s8(mask));
                low[r] = vmladavaq_s8(low[r], v0, digits);
                if (p->bytes == 2) high[r] = vmladavaq_s8(high[r], v1, digits);
            }
        }
        if (last) {
            const int16x8_t more = vldrbq_s16(w);
            w += 8;
#pragma GCC unroll 4
            for (r = 0; r < 4; ++r) {
                const int16_t mask =
                    (int16_t)(bits == 2 && r == 3 ? -1 : (1 << (r + 1) * bits) - 1);
                low[r] = vmladavaq_s16(low[r], end, vandq_s16(more, vdupq_n_s16(mask)));
            }
        }
#pragma GCC unroll 4
        for (r = 0; r < 4; ++r) {
            const uint32_t all = (uint32_t)low[r] + ((uint32_t)high[r] << 8);
            uint32_t sum = (uint32_t)((int32_t)(all - before) >> r * bits);
            if (bits == 1 || r < 3) sum -= x_half;
            if (rows % 4 == 0 || c + r < rows) out[c + r] = (qg_value)(sum + (uint32_t)bias[c + r]);
            before = all;
        }
    }
    qg_requantize_all(p, rows, out);
}

QG_INLINE void qg_product_2(const qg_rows *p, const qg_weights2 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    qg_product_digits(p, 2, w, bias, rows, K, x, planes, out);
}

QG_INLINE void qg_product_1(const qg_rows *p, const qg_weights1 *w, const int32_t *bias, int rows,
                            int K, int16_t *x, int8_t *planes, qg_value *out) {
    qg_product_digits(p, 1, w, bias, rows, K, x, planes, out);
}

#endif
