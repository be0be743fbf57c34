/* Weighted sums, requantization and tables of an integer GRU in C99.
 *
 * All parameters are constant structures, and all functions are inlined. The compiler removes what
 * the widths of a model do not need. Every result equals that of the primitives in fixed_point.h.
 */
#ifndef QUANT_GRU_ARITHMETIC_H
#define QUANT_GRU_ARITHMETIC_H

#include <stddef.h>
#include <stdint.h>

#include "fixed_point.h"

/* The rule of rounding of all sums, as fixed_point.h numbers them; ties to even by default. */
#ifndef QG_RULE
#define QG_RULE 0
#endif

/* Helium of Cortex-M55 and M85, or the dual 16-bit multiplies of Cortex-M4, M7 and M33, where the
 * macros of the compiler say so. The assembly is that of GCC and clang; without optimization
 * they have too few free registers for it. That of Helium rounds ties to even. Define QG_PORTABLE
 * to use portable C everywhere. */
#if defined(QG_PORTABLE) || !defined(__GNUC__) || !defined(__OPTIMIZE__)
#elif QG_RULE == 0 && defined(__ARM_FEATURE_MVE) && (__ARM_FEATURE_MVE & 1) && \
    !defined(QG_WIDE_VALUES)
#define QG_HELIUM 1
#elif defined(__ARM_FEATURE_SIMD32) && __ARM_FEATURE_SIMD32 && !defined(__ARM_BIG_ENDIAN)
#define QG_DUAL 1
#include <arm_acle.h>
#endif

#if defined(__GNUC__)
#define QG_INLINE static inline __attribute__((always_inline, unused))
#else
#define QG_INLINE static inline
#endif
#if !defined(QG_PORTABLE) && defined(__GNUC__) && defined(__ARM_FEATURE_SAT)
#define QG_SATURATES 1
#include <arm_acle.h>
#endif

/* A code or a sum that is not a product. 64 bits only where operators have more than 30 bits. */
#if defined(QG_WIDE_VALUES)
#define QG_VALUE_BITS 64
typedef int64_t qg_value;
#else
#define QG_VALUE_BITS 32
typedef int32_t qg_value;
#endif

/* GCC and clang copy without string.h, which compilers without a C library lack. */
#if defined(__GNUC__)
#define QG_COPY(to, from, bytes) __builtin_memcpy(to, from, bytes)
#else
#include <string.h>
#define QG_COPY(to, from, bytes) memcpy(to, from, bytes)
#endif

/* This code needs a >> that keeps the sign. */
typedef char qg_shift_keeps_the_sign[(-1 >> 1) == -1 ? 1 : -1];

/* clamp(round((M1*(a1*b1 - z1) + M2*(a2*b2 - z2)) / 2^k) + zero, lo, hi) */
typedef struct {
    int64_t M1, M2; /* multipliers */
    int64_t z1, z2; /* zero points of terms; 0 for products */
    int k;          /* shift; not negative unless bits is 128 */
    int bits;       /* 32, 64 or 128: integers that hold the sum and half of 2^k; 33 for one
                       product of a1*M1 and b1*M2, of 32 bits each, where k > 32; QG_DOUBLE: 128 */
    int small;      /* whether 32 bits hold the rounded sum */
    int64_t zero, lo, hi;
} qg_sum;

#if defined(QG_SATURATES)
/* the macros of arm_acle.h convert signs */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif
QG_INLINE int32_t qg_clamp32(int32_t v, int32_t lo, int32_t hi) {
#if defined(QG_SATURATES)
    /* one instruction */
    if (lo == -128 && hi == 127) return __ssat(v, 8);
    if (lo == 0 && hi == 255) return (int32_t)__usat(v, 8);
    if (lo == -32768 && hi == 32767) return __ssat(v, 16);
    if (lo == 0 && hi == 65535) return (int32_t)__usat(v, 16);
#endif
    v = v < lo ? lo : v;
    return v > hi ? hi : v;
}
#if defined(QG_SATURATES)
#pragma GCC diagnostic pop
#endif

/* What is added to v before it is shifted by k > 0. Narrow sums and tables never have two steps. */
QG_INLINE int64_t qg_half(int64_t v, int k) {
    const int64_t half = (int64_t)1 << (k - 1);
    if (QG_RULE == QG_HALF_EVEN) return half - 1 + ((v >> k) & 1);
    if (QG_RULE == QG_HALF_AWAY) return half - (v < 0);
    return QG_RULE == QG_FLOOR ? 0 : half;
}

/* The bits of a multiplier. */
QG_INLINE int qg_bits(uint64_t M) {
    int bits = 0;
    for (; M; M >>= 1) ++bits;
    return bits;
}

/* clamp(round(v / 2^k) + zero, lo, hi). The zero point is added before the shift, so that one
 * instruction may shift and saturate. `v` plus or minus 2^(k-1) + |zero| * 2^k does not overflow.
 */
QG_INLINE qg_value qg_code32(int32_t v, int k, int64_t zero, int64_t lo, int64_t hi) {
#if QG_RULE == 0
    const int32_t half = k ? (int32_t)((1u << (k - 1)) - 1u) : 0;
    const int32_t add = half + (int32_t)zero * (int32_t)(1u << k);
    const int32_t odd = k ? (v >> k) & 1 : 0;
#else
    const int32_t add = (int32_t)zero * (int32_t)(1u << k);
    const int32_t odd = k ? (int32_t)qg_half(v, k) : 0;
#endif
    return (qg_value)qg_clamp32((v + add + odd) >> k, (int32_t)lo, (int32_t)hi);
}

/* The same for 64 bits. `small`: 32 bits hold the value before the clamp. */
QG_INLINE qg_value qg_code64(int64_t v, int k, int small, int64_t zero, int64_t lo, int64_t hi) {
    const int64_t half = k ? qg_half(v, k) : 0;
    const int64_t rounded = (v + half + zero * ((int64_t)1 << k)) >> k;
    if (small) return (qg_value)qg_clamp32((int32_t)rounded, (int32_t)lo, (int32_t)hi);
    return (qg_value)qg_clamp(rounded, lo, hi);
}

/* clamp(round(a * M / 2^k) + zero, lo, hi) for k > 32, where 32 bits hold a*M >> 32, plus or minus
 * 2^(k-33) + |zero| * 2^(k-32). */
QG_INLINE qg_value qg_code_high(int32_t a, int32_t M, int k, int64_t zero, int64_t lo, int64_t hi) {
    const int32_t add = (int32_t)zero * (int32_t)(1u << (k - 32));
    const int64_t v = (int64_t)a * M;
#if defined(QG_DUAL) && QG_RULE == 0
    /* v + 2^(k-1) - 1 + (quotient & 1), with the last bit of the quotient as a carry */
    int32_t high = (int32_t)(v >> 32);
    uint32_t low = (uint32_t)v, last;
    const int32_t half = (int32_t)((1u << (k - 33)) - 1u) + add;
    __asm(
        "lsrs %[last], %[high], %[shift]\n\t"
        "adcs %[low], %[low], #-1\n\t"
        "adc %[high], %[high], %[half]"
        : [high] "+r"(high), [low] "+r"(low), [last] "=&r"(last)
        : [shift] "r"(k - 31), [half] "r"(half)
        : "cc");
    return (qg_value)qg_clamp32(high >> (k - 32), (int32_t)lo, (int32_t)hi);
#else
    const int32_t t = (int32_t)(v >> 32) + (QG_RULE == QG_FLOOR ? 0 : (int32_t)(1u << (k - 33)));
    int32_t q = t >> (k - 32);
    /* A tie is rounded up above; the even neighbour, or the one away from zero, is one below. */
    if (((uint32_t)t << (64 - k) | (uint32_t)v) == 0) {
        if (QG_RULE == QG_HALF_EVEN) q &= ~1;
        if (QG_RULE == QG_HALF_AWAY) q -= v < 0;
    }
    (void)add;
    return (qg_value)qg_clamp32(q + (int32_t)zero, (int32_t)lo, (int32_t)hi);
#endif
}

/* The code of a sum of two terms. A term that is not a product has the factor 1. */
QG_INLINE qg_value qg_apply(const qg_sum *s, qg_value a1, qg_value b1, qg_value a2, qg_value b2) {
    if (s->bits == 32) {
        /* unsigned: single terms may wrap, the sum does not */
        const uint32_t add = (uint32_t)(s->M1 * s->z1 + s->M2 * s->z2);
        const uint32_t t1 = (uint32_t)s->M1 * ((uint32_t)a1 * (uint32_t)b1);
        const uint32_t t2 = (uint32_t)s->M2 * ((uint32_t)a2 * (uint32_t)b2);
        const int32_t v = (int32_t)(t1 + t2 - add);
        return qg_code32(v, s->k, s->zero, s->lo, s->hi);
    }
    if (s->bits == 33)
        return qg_code_high((int32_t)(a1 * (qg_value)s->M1), (int32_t)(b1 * (qg_value)s->M2), s->k,
                            s->zero, s->lo, s->hi);
    if (s->bits == 64) {
        const uint64_t p1 = (uint64_t)((int64_t)a1 * b1), p2 = (uint64_t)((int64_t)a2 * b2);
        const uint64_t add = (uint64_t)(s->M1 * s->z1 + s->M2 * s->z2);
        const int64_t v = (int64_t)((uint64_t)s->M1 * p1 + (uint64_t)s->M2 * p2 - add);
        return qg_code64(v, s->k, s->small, s->zero, s->lo, s->hi);
    }
    const qg_wide p1 = qg_wide_product((int64_t)a1 - s->z1, b1);
    const qg_wide p2 = qg_wide_product((int64_t)a2 - s->z2, b2);
    const qg_wide v = qg_wide_add(qg_wide_times_word(p1, (uint64_t)s->M1),
                                  qg_wide_times_word(p2, (uint64_t)s->M2));
    const int first = qg_bits((uint64_t)(s->M1 | s->M2));
    return (qg_value)qg_clamp(qg_wide_round_by(v, s->k, QG_RULE, first) + s->zero, s->lo, s->hi);
}

/* How the accumulators of a matrix product become codes: rows of M and k. */
typedef struct {
    int bits;       /* 32, 33, 64, 65 or 128; see qg_requantize */
    int k;          /* shift of all rows where bits is below 65 */
    int32_t M;      /* multiplier of all rows, or 0: see Ms */
    int bias_shift; /* unit of the bias, where bits is 128 */
    const int32_t *Ms;
    const int16_t *ks;
    int64_t zero, lo, hi;
    int bytes; /* bytes of an element of the operand, 1 or 2, beside weights of up to 8 bits */
    int pairs; /* bits of sums of several rows: 32; 64; 48 if lower bytes of two need 32 */
} qg_rows;

/* The code of row c. `v` is the accumulator with its bias.
 * bits: 32 if 32 bits hold v*M; 33 if k > 32 and 32 bits hold the upper word; 64 if 64 bits hold
 * v*M; 65 if each row has a shift of its own. */
QG_INLINE qg_value qg_requantize(const qg_rows *p, int c, int64_t v) {
    const int32_t M = p->M ? p->M : p->Ms[c];
    if (p->bits == 32) return qg_code32((int32_t)v * M, p->k, p->zero, p->lo, p->hi);
    if (p->bits == 33) return qg_code_high((int32_t)v, M, p->k, p->zero, p->lo, p->hi);
    if (p->bits == 64) return qg_code64(v * M, p->k, 0, p->zero, p->lo, p->hi);
    return (qg_value)qg_clamp(qg_round_by(v * M, p->ks[c], QG_RULE, qg_bits((uint64_t)M)) + p->zero,
                              p->lo, p->hi);
}

/* The code of row c of a product beyond 64 bits: high * 2^16 + low + bias * 2^bias_shift. */
QG_INLINE qg_value qg_requantize_wide(const qg_rows *p, int c, int64_t high, int64_t low,
                                      int64_t bias) {
    qg_wide v = qg_wide_left(qg_wide_of(bias), p->bias_shift);
    v = qg_wide_add(v, qg_wide_left(qg_wide_of(high), 16));
    v = qg_wide_add(v, qg_wide_of(low));
    v = qg_wide_times(v, (uint32_t)p->Ms[c]);
    return (qg_value)qg_clamp(
        qg_wide_round_by(v, p->ks[c], QG_RULE, qg_bits((uint64_t)p->Ms[c])) + p->zero, p->lo,
        p->hi);
}

/* A piecewise polynomial from codes to codes without their zero point. */
typedef struct {
    int64_t first, last; /* input codes are clamped to these */
    int segments, degree, shift;
    int segment_shift;      /* u if every segment has 2^u codes, otherwise -1 */
    int64_t lo, hi;         /* of the output, less its zero point */
    const uint32_t *bounds; /* less `first` */
    const int64_t *coefficients;
} qg_table;

/* Parabolas over segments of 2^u codes in 32 bits, see docs/arithmetic.md. The exporter has
 * compared every code with the table of the plan. */
typedef struct {
    int32_t first; /* code at which segment 0 would begin */
    int u, e, s, g;
    int32_t lo, hi;
    const int32_t *slopes;  /* c1 of each segment */
    const uint16_t *starts; /* code, rest, and c2 modulo 2^16 of each segment */
} qg_short_table;

/* A table with an entry for each code, in blocks of 2^u codes whose entries differ by less than 16.
 */
typedef struct {
    int32_t first; /* code of the first entry */
    int u;
    int32_t lo;             /* the smallest entry */
    const uint16_t *starts; /* the smallest entry of each block, less `lo` */
    const uint8_t *rests;   /* entries less the start of their block, two in a byte */
} qg_block_table;

QG_INLINE qg_value qg_look_up_block(const qg_block_table *t, qg_value code) {
    const uint32_t i = (uint32_t)((int32_t)code - t->first);
    return t->lo + (int32_t)t->starts[i >> t->u] + ((t->rests[i >> 1] >> 4 * (i & 1)) & 15);
}

QG_INLINE qg_value qg_look_up_short(const qg_short_table *t, qg_value code) {
    const int32_t q = (int32_t)code - t->first;
    const uint16_t *const start = t->starts + 3 * (q >> t->u);
    const int32_t d = q & ((1 << t->u) - 1);
    const int32_t rise = (t->slopes[q >> t->u] + (((int16_t)start[2] * d) >> t->e)) * d;
    const int32_t change = (((int32_t)start[1] << t->s) + rise) >> t->g;
    return (qg_value)qg_clamp32(t->lo + (int32_t)start[0] + change, t->lo, t->hi);
}

QG_INLINE qg_value qg_look_up(const qg_table *t, qg_value code) {
    const int64_t q = qg_clamp(code, t->first, t->last);
    int segment = 0, power;
    int64_t d, y;
    const int64_t *c;
    if (t->segment_shift >= 0) {
        segment = (int)((q - t->first) >> t->segment_shift);
        d = (q - t->first) & (((int64_t)1 << t->segment_shift) - 1);
    } else {
        int high = t->segments - 1;
        while (segment < high) {
            const int middle = (segment + high + 1) / 2;
            if (t->bounds[middle] <= q - t->first)
                segment = middle;
            else
                high = middle - 1;
        }
        d = q - t->first - t->bounds[segment];
    }
    c = t->coefficients + segment * (t->degree + 1);
    y = c[t->degree];
    for (power = t->degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_code64(y, t->shift, 0, 0, t->lo, t->hi);
}

#endif
