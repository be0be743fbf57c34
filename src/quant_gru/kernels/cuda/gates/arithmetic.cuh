// The gate arithmetic of one element, and its constants. It includes only headers of this project,
// so that NVRTC compiles it for the device and, in tests, a C++ compiler for the host.
//
//   QG_RULE        0 to 3   the rule of rounding, see fixed_point.h; undefined for 0
//   QG_INPUT_RULE  0 to 3   the rule for real values; undefined for 0
#ifndef QUANT_GRU_CELL_CUH
#define QUANT_GRU_CELL_CUH

#include "c99/fixed_point.h"

#ifndef QG_RULE
#define QG_RULE 0
#endif
#ifndef QG_INPUT_RULE
#define QG_INPUT_RULE 0
#endif

#ifndef PTX_ON_HOST
#define QG_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// The magic numbers 1.5 * 2^23 and 1.5 * 2^52: adding one rounds to an integer, ties to even. A sum
// can be compared, clamped and read as bits without subtracting the magic number first.
template <class Real>
struct Magic;
template <>
struct Magic<float> {
    static inline float number() { return 12582912.f; }
    static inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    static inline float times(float a, float b) { return __fmul_rn(a, b); }
    static inline float plus(float a, float b) { return __fadd_rn(a, b); }
    // rounded down
    static inline float fma_down(float a, float b, float c) { return __fmaf_rd(a, b, c); }
    static inline float plus_down(float a, float b) { return __fadd_rd(a, b); }
    static inline float size(float v) { return fabsf(v); }
    static inline float with_sign(float v, float of) { return copysignf(v, of); }
    // 1/2, or the number below it if v is negative
    static inline float half_toward(float v) {
        return __int_as_float(0x3F000000 + (__float_as_int(v) >> 31));
    }
    static inline int32_t integer(float v) { return __float_as_int(v) - 0x4B400000; }
    // raw: bits of a sum, usable as an integer; raw_zero: bits of 0; from: integer + magic number
    static inline int32_t raw(float v) { return __float_as_int(v); }
    static inline int32_t raw_zero() { return 0x4B400000; }
    static inline float from(int32_t v) { return __int_as_float(0x4B400000 + v); }
    static inline float limit(float v, float lo, float hi) { return fminf(fmaxf(v, lo), hi); }
};
template <>
struct Magic<double> {
    static inline double number() { return 6755399441055744.; }
    static inline double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
    static inline double times(double a, double b) { return __dmul_rn(a, b); }
    static inline double plus(double a, double b) { return __dadd_rn(a, b); }
    static inline double fma_down(double a, double b, double c) { return __fma_rd(a, b, c); }
    static inline double plus_down(double a, double b) { return __dadd_rd(a, b); }
    static inline double size(double v) { return fabs(v); }
    static inline double with_sign(double v, double of) { return copysign(v, of); }
    static inline double half_toward(double v) { return v < 0 ? 0x1.fffffffffffffp-2 : 0.5; }
    static inline int32_t integer(double v) { return __double2loint(v); }
    static inline int32_t raw(double v) { return __double2loint(v); }
    static inline int32_t raw_zero() { return 0; }
    static inline double from(int32_t v) { return __dadd_rn((double)v, number()); }
    static inline double limit(double v, double lo, double hi) {
        v = v < lo ? lo : v;
        return v > hi ? hi : v;
    }
};

// clamp(rne((M1*v1 + M2*v2) / 2^k), lo, hi). Zero points are subtracted from the limits, so the
// result is zero-point-free. m = M / 2^k is exact in Real.
template <class Real>
struct Sum {
    Real m[2];
    Real lo, hi;  // limits plus the magic number
    int64_t M[2];
    int64_t k, low, high;
    int64_t in_words;  // the sum needs 64-bit integers
};

// A piecewise polynomial. `direct`, unless null, has one entry per input code, starting at
// `pre_lo`.
struct Table {
    const float *direct;  // zero-point-free output codes
    const int64_t *bounds;
    const int64_t *coefficients;  // (segments, degree + 1)
    int64_t entries;
    int64_t pre_lo, pre_zero;  // first input code of `direct`; zero point of the input
    int64_t segments, degree, shift, last;
    int64_t segment_shift;  // log2 of the codes per segment, if all segments have equal length
    int64_t lo, hi;         // limits of the output minus its zero point
    double scale;           // 2^-shift
    const void *lines;      // see compressed_table.cuh, or null
    int64_t line_origin, line_count;  // zero-point-free input code of the first line
    int64_t least;                    // smallest input code
};

template <class Real>
struct Cell {
    Sum<Real> z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h;
    Sum<Real> zoneout;  // combines the states before and after a step
    Table z, r, g;
    Real one;
    Real Rh_lo, Rh_hi;  // limits plus the magic number
    Real Wx_offset;  // stored Wx minus zero-point-free Wx: its zero point minus its smallest code
    int64_t h_zero;
    int64_t h_offset;  // subtracted from state codes that are stored in bytes
    int64_t one_integer;
};

// Rounding by a rule. Integers up to the magic number are numbers of Real. So a value that is
// rounded down to a number of Real, and then down to an integer, is rounded down once:
//
//   floor(x)                = down(x + magic) - magic
//   half_up(x)              = floor(x + 1/2)
//   half_away(x) for x >= 0 = floor(x + 1/2); for x < 0 it is -floor(-x + 1/2)
//
// In each, `down` of a sum or a product plus a constant is one instruction. Integers beyond half of
// the magic number are not exact; they are beyond all limits.

// Return a * b, rounded, plus the magic number. Only the product's sign is that of `sign`.
template <int kRule, class Real>
inline Real round_product(Real a, Real b, Real sign) {
    typedef Magic<Real> R;
    if (kRule == QG_HALF_EVEN) return R::fma(a, b, R::number());
    if (kRule == QG_FLOOR) return R::fma_down(a, b, R::number());
    if (kRule == QG_HALF_UP) return R::plus_down(R::fma_down(a, b, (Real)0.5), R::number());
    // the magnitude is rounded up at ties; then the magic number is added to 1 or -1 times it
    const Real one = R::with_sign((Real)1, sign);
    const Real size = R::plus_down(R::fma_down(R::size(a), R::size(b), (Real)0.5), R::number());
    return R::fma(size, one, R::fma(-R::number(), one, R::number()));
}

// Return v, which is exact, rounded, plus the magic number. With QG_HALF_AWAY, a number just below
// 1/2 turns ties of negative values down. It changes nothing else: v is a multiple of 2^-k that is
// exact in Real. If k is at most 25 (54 in double), other values are at least 2^-k from ties.
// Otherwise |v| is below 1/2, and there is no tie.
template <int kRule, class Real>
inline Real round_exact(Real v) {
    typedef Magic<Real> R;
    if (kRule == QG_HALF_EVEN) return R::plus(v, R::number());
    if (kRule == QG_FLOOR) return R::plus_down(v, R::number());
    const Real half = kRule == QG_HALF_AWAY ? R::half_toward(v) : (Real)0.5;
    return R::plus_down(R::plus_down(v, half), R::number());
}

// Return the rounded product plus the magic number. m is not negative.
template <class Real>
inline Real round_term(Real v, Real m) {
    return round_product<QG_RULE>(v, m, v);
}

// The same for a product of two numbers of any sign.
template <class Real>
inline Real round_signed(Real a, Real b) {
    if (QG_RULE != QG_HALF_AWAY) return round_product<QG_RULE>(a, b, a);
    return round_product<QG_RULE>(a, b, Magic<Real>::times(a, b));
}

// Return a sum, which is exact, rounded, plus the magic number.
template <class Real>
inline Real round_sum(Real v) {
    return round_exact<QG_RULE>(v);
}

template <class Real>
inline Real clamped(const Sum<Real> &s, Real v) {
    return Magic<Real>::limit(v, s.lo, s.hi);
}

template <class Real>
inline Real plain(Real v) {
    return Magic<Real>::plus(v, -Magic<Real>::number());
}

// The weighted sum of one term, plus the magic number.
template <class Real>
inline Real weighted(const Sum<Real> &s, Real v) {
    return clamped(s, round_term(v, s.m[0]));
}

// The weighted sum of one term a * b. With QG_POT the multiplier is a power of two, so its product
// with `a`, which is known first, is exact. Then only the sum rounds, even where a * b needs more
// bits than Real has.
template <class Real>
inline Real weighted_product(const Sum<Real> &s, Real a, Real b) {
#if QG_POT
    return clamped(s, round_signed(Magic<Real>::times(a, s.m[0]), b));
#else
    return weighted(s, Magic<Real>::times(a, b));
#endif
}

// The weighted sum of two terms, plus the magic number. Sums that exceed 53 bits use int64.
template <class Real>
inline Real weighted(const Sum<Real> &s, Real v1, Real v2) {
#if QG_WORDS
    if (s.in_words) {
        const int64_t total = (int64_t)v1 * s.M[0] + (int64_t)v2 * s.M[1];
        const int64_t rounded = qg_clamp(qg_round_by(total, (int)s.k, QG_RULE, 0), s.low, s.high);
        return Magic<Real>::plus((Real)rounded, Magic<Real>::number());
    }
#endif
    // the term that is known last costs one instruction; the sum is exact in either order
    const Real total = Magic<Real>::fma(v2, s.m[1], Magic<Real>::times(v1, s.m[0]));
    return clamped(s, round_sum(total));
}

// The table output of a gate for the weighted sum of two terms.
template <class Real, class Of>
inline Real gate_of(const Of &of, const Sum<Real> &s, Real v1, Real v2) {
    return of(weighted(s, v1, v2));
}

// How a kernel reads a table. kDirect, kDistant: one entry per code in shared or global memory.
// kQuadratic: quadratics of equal length in shared memory; all their arithmetic is exact in double.
constexpr int kDirect = 0, kDistant = 1, kQuadratic = 2;

template <int kMode>
struct Reader {
    const float *direct;  // indexed by the zero-point-free input code
    const double *c;      // [power][segment]
    int first, last, zero, segments, u;
    double scale, lo, hi;

    // Copy the data that the mode needs into shared memory, and return the first byte after it.
    inline unsigned char *open(const Table &t, unsigned char *memory) {
        zero = (int)t.pre_zero;
        if (kMode == kQuadratic) {
            double *to = (double *)memory;
            segments = (int)t.segments;
            for (int i = threadIdx.x; i < 3 * segments; i += blockDim.x)
                to[i] = (double)t.coefficients[i % segments * 3 + i / segments];
            c = to;
            first = (int)t.bounds[0];
            last = (int)t.last;
            u = (int)t.segment_shift;
            scale = t.scale;
            lo = Magic<double>::number() + (double)t.lo;
            hi = Magic<double>::number() + (double)t.hi;
            return memory + 3 * segments * sizeof(double);
        }
        const int origin = (int)(t.pre_lo - t.pre_zero);
        direct = t.direct - origin;
        if (kMode == kDistant) return memory;
        float *to = (float *)memory;
        for (int i = threadIdx.x; i < (int)t.entries; i += blockDim.x) to[i] = t.direct[i];
        direct = to - origin;
        return memory + (t.entries + 1) / 2 * 8;
    }

    // Return the zero-point-free output code for `sum`, which includes the magic number.
    template <class Real>
    inline Real operator()(Real sum) const {
        const int32_t v = Magic<Real>::integer(sum);
        if (kMode != kQuadratic) return (Real)direct[v];
        int32_t q = v + zero;
        q = (q < first ? first : q > last ? last : q) - first;
        const int segment = q >> u;
        const double d = (double)(q - (segment << u));
        const double y = Magic<double>::fma(
            Magic<double>::fma(c[2 * segments + segment], d, c[segments + segment]), d, c[segment]);
        return (Real)plain(Magic<double>::limit(round_term(y, scale), lo, hi));
    }
};

// Return h' plus the magic number, from zero-point-free codes.
template <class Real, class Z, class Reset, class G>
inline Real next_state(const Cell<Real> &c, const Z &z_of, const Reset &r_of, const G &g_of,
                       Real Wx_z, Real Wx_r, Real Wx_g, Real Rh_z, Real Rh_r, Real Rh_g, Real h) {
    typedef Magic<Real> R;
    const Real r = gate_of(r_of, c.r_pre, Wx_r, Rh_r);
    const Real z = gate_of(z_of, c.z_pre, Wx_z, Rh_z);
#if QG_RRH
    const Real rest = plain(weighted_product(c.rRh, Rh_g, r));
#else
    const Real rest = R::times(r, Rh_g);
#endif
    const Real g = gate_of(g_of, c.g_pre, Wx_g, rest);
    const Real left = R::plus(c.one, -z);
#if QG_OLD
    const Real old = plain(weighted_product(c.old_contrib, h, z));
#else
    const Real old = R::times(z, h);
#endif
#if QG_NEW
    const Real fresh = plain(weighted_product(c.new_contrib, left, g));
#else
    const Real fresh = R::times(left, g);
#endif
    return weighted(c.h, old, fresh);
}

// Read element i of a container; `kind` as in Sequence.
inline int64_t read_code(const void *codes, int64_t kind, int64_t i) {
    switch (kind) {
        case 0:
            return ((const int8_t *)codes)[i];
        case 1:
            return ((const uint8_t *)codes)[i];
        case 2:
            return ((const int16_t *)codes)[i];
        case 3:
            return ((const int32_t *)codes)[i];
        default:
            return ((const int64_t *)codes)[i];
    }
}

inline void write_code(void *codes, int64_t kind, int64_t i, int64_t v) {
    switch (kind) {
        case 0:
            ((int8_t *)codes)[i] = (int8_t)v;
            break;
        case 1:
            ((uint8_t *)codes)[i] = (uint8_t)v;
            break;
        case 2:
            ((int16_t *)codes)[i] = (int16_t)v;
            break;
        case 3:
            ((int32_t *)codes)[i] = (int32_t)v;
            break;
        default:
            ((int64_t *)codes)[i] = v;
            break;
    }
}

// The offset of unit lane8 + 8 * row8 and row n in a group of 16 units by the rows of a tile. The
// order is the one in which threads of the recurrent kernel read the elements.
inline int stored_at(int rows, int lane8, int row8, int n) {
    return rows == 8 ? lane8 * 16 + n * 2 + row8 : lane8 * 2 * rows + row8 * rows + n;
}

// Addresses of a sequence. Kinds: 0 int8, 1 uint8, 2 int16, 3 int32, 4 int64.
struct Sequence {
    const void *x;           // (T, N, C)
    const void *h0;          // (N, H), or null for zero points
    void *out;               // (T, N, H)
    void *last;              // (N, H)
    const int64_t *lengths;  // (N) or null
    void *workspace;
    int64_t x_kind, h_kind;
    int64_t T, N, C, H;
    int64_t reverse;
    const uint8_t *held;  // (T, N, H), or null: nonzero where a unit keeps its state in a step
};

// Return a code of the initial state.
inline int64_t first_code(const Sequence &s, int64_t at, int64_t zero) {
    return s.h0 ? read_code(s.h0, s.h_kind, at) : zero;
}

// The integer operands of a projection, W x or R h.
struct Matrix {
    const void *codes;     // (3H, K) or, transposed, (K, 3H); int8, int16 or int32
    const int64_t *bias;   // (3H), in 2^bias_shift accumulator units
    const int64_t *M, *k;  // (3H)
    const double *m;       // (3H), M / 2^k
    int64_t kind;          // of the codes
    int64_t bias_shift;
    int64_t zero;     // zero point of the operand
    int64_t lo, hi;   // limits of the result minus its zero point
    int64_t code_lo;  // smallest code of the result minus its zero point
};

#endif
