/* Exact fixed-point primitives in C99: no floating point, no 128-bit type, no undefined shifts.
 *
 * weighted_sum = clamp(round((M_1*v_1 + .. + M_n*v_n) / 2^k) + z, lo, hi). These functions compute
 * the sum and round it once, by the rule of the plan. Results beyond every code range saturate.
 */
#ifndef QUANT_GRU_FIXED_POINT_H
#define QUANT_GRU_FIXED_POINT_H

#include <stdint.h>

/* A 128-bit two's complement integer in two words. */
typedef struct {
    int64_t hi;
    uint64_t lo;
} qg_wide;

/* The rules of rounding. QG_DOUBLE rounds the bits of the multiplier half up, then the others half
 * away from zero. */
enum { QG_HALF_EVEN, QG_HALF_AWAY, QG_HALF_UP, QG_FLOOR, QG_DOUBLE };

/* Saturation limits. 2^34 is beyond the range of the widest codes (32 bits). */
#define QG_SATURATED ((int64_t)1 << 34)
#define QG_WIDE_SATURATED ((int64_t)1 << 62)

static inline int64_t qg_clamp(int64_t v, int64_t lo, int64_t hi) {
    return v < lo ? lo : v > hi ? hi : v;
}

/* floor(v / 2^k) for 0 <= k <= 63, without relying on the sign of >>. */
static inline int64_t qg_floor_shift(int64_t v, int k) {
    return v >= 0 ? (int64_t)((uint64_t)v >> k) : (int64_t)~(~(uint64_t)v >> k);
}

/* v * 2^s, saturated at +-2^34. */
static inline int64_t qg_left(int64_t v, int s) {
    if (v == 0) return 0;
    if (s >= 34) return v > 0 ? QG_SATURATED : -QG_SATURATED;
    const int64_t limit = QG_SATURATED >> s;
    return qg_clamp(v, -limit, limit) * ((int64_t)1 << s);
}

/* rne(v / 2^k) for any k and all v. Saturates at +-2^34 if k is negative. */
static inline int64_t qg_round(int64_t v, int k) {
    if (k <= 0) return k == 0 ? v : qg_left(v, k < -64 ? 64 : -k);
    if (k > 63) return 0;
    const int64_t quotient = qg_floor_shift(v, k);
    const uint64_t rest = (uint64_t)v & (((uint64_t)1 << k) - 1);
    const uint64_t half = (uint64_t)1 << (k - 1);
    return quotient + (rest + ((uint64_t)quotient & 1) > half);
}

/* v / 2^k for k >= 0 by QG_HALF_AWAY, QG_HALF_UP or QG_FLOOR. */
static inline int64_t qg_shift(int64_t v, int k, int rule) {
    if (k == 0) return v;
    if (k > 63) return rule == QG_FLOOR && v < 0 ? -1 : 0;
    const int64_t quotient = qg_floor_shift(v, k);
    if (rule == QG_FLOOR) return quotient;
    const uint64_t rest = (uint64_t)v & (((uint64_t)1 << k) - 1);
    const uint64_t half = (uint64_t)1 << (k - 1);
    return quotient + (rest >= half + (rule == QG_HALF_AWAY && v < 0));
}

/* v / 2^k by any rule, for any k and all v. Saturates at +-2^34 if k is negative. `first`: the bits
 * of the largest multiplier; only QG_DOUBLE uses it. */
static inline int64_t qg_round_by(int64_t v, int k, int rule, int first) {
    if (k <= 0 || rule == QG_HALF_EVEN) return qg_round(v, k);
    if (rule != QG_DOUBLE) return qg_shift(v, k, rule);
    if (first > k) first = k;
    return qg_shift(qg_shift(v, first, QG_HALF_UP), k - first, QG_HALF_AWAY);
}

static inline qg_wide qg_wide_of(int64_t v) {
    qg_wide r;
    r.hi = v < 0 ? -1 : 0;
    r.lo = (uint64_t)v;
    return r;
}

static inline qg_wide qg_wide_add(qg_wide a, qg_wide b) {
    qg_wide r;
    r.lo = a.lo + b.lo;
    r.hi = (int64_t)((uint64_t)a.hi + (uint64_t)b.hi + (r.lo < a.lo));
    return r;
}

static inline qg_wide qg_wide_negate(qg_wide a) {
    qg_wide r;
    r.lo = ~a.lo + 1;
    r.hi = (int64_t)(~(uint64_t)a.hi + (r.lo == 0));
    return r;
}

/* a * m, modulo 2^128. */
static inline qg_wide qg_wide_times(qg_wide a, uint32_t m) {
    const uint64_t low = (a.lo & 0xffffffffu) * m;
    const uint64_t middle = (a.lo >> 32) * m + (low >> 32);
    qg_wide r;
    r.lo = (middle << 32) | (low & 0xffffffffu);
    r.hi = (int64_t)((uint64_t)a.hi * m + (middle >> 32));
    return r;
}

/* a * b, exact. */
static inline qg_wide qg_wide_product(int64_t a, int64_t b) {
    const uint64_t x = a < 0 ? ~(uint64_t)a + 1 : (uint64_t)a;
    const uint64_t y = b < 0 ? ~(uint64_t)b + 1 : (uint64_t)b;
    qg_wide high = qg_wide_times(qg_wide_of(0), 0), low;
    low.hi = 0;
    low.lo = x;
    high = qg_wide_times(low, (uint32_t)(y >> 32));
    high.hi = (int64_t)(((uint64_t)high.hi << 32) | (high.lo >> 32));
    high.lo <<= 32;
    low = qg_wide_add(high, qg_wide_times(low, (uint32_t)y));
    return (a < 0) != (b < 0) ? qg_wide_negate(low) : low;
}

/* a * 2^s for 0 <= s < 64, modulo 2^128. */
static inline qg_wide qg_wide_left(qg_wide a, int s) {
    qg_wide r = a;
    if (s) {
        r.hi = (int64_t)(((uint64_t)a.hi << s) | (a.lo >> (64 - s)));
        r.lo = a.lo << s;
    }
    return r;
}

/* a * m for a 64-bit m, modulo 2^128. */
static inline qg_wide qg_wide_times_word(qg_wide a, uint64_t m) {
    const qg_wide low = qg_wide_times(a, (uint32_t)m);
    if (!(m >> 32)) return low;
    return qg_wide_add(low, qg_wide_left(qg_wide_times(a, (uint32_t)(m >> 32)), 32));
}

/* The value as int64, saturated at +-2^62. */
static inline int64_t qg_wide_saturate(qg_wide a) {
    const int64_t low = (int64_t)a.lo;
    if (a.hi != (low < 0 ? -1 : 0)) return a.hi < 0 ? -QG_WIDE_SATURATED : QG_WIDE_SATURATED;
    return qg_clamp(low, -QG_WIDE_SATURATED, QG_WIDE_SATURATED);
}

/* a / 2^k for k >= 0 by any rule but QG_DOUBLE. */
static inline qg_wide qg_wide_shift(qg_wide a, int k, int rule) {
    qg_wide quotient = qg_wide_of(a.hi < 0 ? -1 : 0);
    const uint64_t hi = (uint64_t)a.hi, lo = a.lo;
    uint64_t half, below;
    int up;
    if (k == 0) return a;
    if (k > 127) return rule == QG_FLOOR ? quotient : qg_wide_of(0);
    if (k < 64) {
        quotient.hi = qg_floor_shift(a.hi, k);
        quotient.lo = (lo >> k) | (hi << (64 - k));
        half = (lo >> (k - 1)) & 1;
        below = lo & (((uint64_t)1 << (k - 1)) - 1);
    } else {
        const int s = k - 64;
        quotient.lo = (uint64_t)qg_floor_shift(a.hi, s);
        half = s ? (hi >> (s - 1)) & 1 : lo >> 63;
        below = s ? (hi & (((uint64_t)1 << (s - 1)) - 1)) | lo : lo << 1;
    }
    /* where a tie goes up */
    up = rule == QG_HALF_EVEN ? (int)(quotient.lo & 1) : rule == QG_HALF_UP || a.hi >= 0;
    if (rule != QG_FLOOR && half && (below || up)) return qg_wide_add(quotient, qg_wide_of(1));
    return quotient;
}

/* a / 2^k by any rule, for any k, saturated at +-2^62. `first`: as for qg_round_by. */
static inline int64_t qg_wide_round_by(qg_wide a, int k, int rule, int first) {
    if (k <= 0) {
        const int64_t v = qg_wide_saturate(a);
        return k == 0 ? v : qg_left(v, k < -64 ? 64 : -k);
    }
    if (rule == QG_DOUBLE) {
        if (first > k) first = k;
        a = qg_wide_shift(a, first, QG_HALF_UP);
        k -= first;
        rule = QG_HALF_AWAY;
    }
    return qg_wide_saturate(qg_wide_shift(a, k, rule));
}

/* rne(a / 2^k) for any k, saturated at +-2^62. */
static inline int64_t qg_wide_round(qg_wide a, int k) {
    return qg_wide_round_by(a, k, QG_HALF_EVEN, 0);
}

#endif
