// The gate arithmetic of one element, and the numbers it needs; no headers but our own, so that it
// compiles for the device by NVRTC and, for tests, for the host by a C++ compiler.
#ifndef QUANT_GRU_CELL_CUH
#define QUANT_GRU_CELL_CUH

#include "c99/fixed_point.h"

#ifndef PTX_ON_HOST
#define QG_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

// 1.5 * 2^23 and 1.5 * 2^52: added to a number, they round it to an integer, half-even. A sum that
// still has the magic number inside is compared, clamped and read as bits without being taken off.
template <class Real>
struct Magic;
template <>
struct Magic<float> {
    static inline float number() { return 12582912.f; }
    static inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
    static inline float times(float a, float b) { return __fmul_rn(a, b); }
    static inline float plus(float a, float b) { return __fadd_rn(a, b); }
    static inline int32_t integer(float v) { return __float_as_int(v) - 0x4B400000; }
    // bits that are an integer and those of 0; an integer, magic number added
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
    static inline int32_t integer(double v) { return __double2loint(v); }
    static inline int32_t raw(double v) { return __double2loint(v); }
    static inline int32_t raw_zero() { return 0; }
    static inline double from(int32_t v) { return __dadd_rn((double)v, number()); }
    static inline double limit(double v, double lo, double hi) {
        v = v < lo ? lo : v;
        return v > hi ? hi : v;
    }
};

// clamp(rne((M1*v1 + M2*v2) / 2^k), lo, hi): zero points are taken off the limits and come out of
// the result. m = M / 2^k is exact in Real.
template <class Real>
struct Sum {
    Real m[2];
    Real lo, hi;  // limits with the magic number added
    int64_t M[2];
    int64_t k, low, high;
    int64_t in_words;  // the sum needs 64-bit integers
};

// A piecewise polynomial; `direct`, where it is not null, has one entry per code from `pre_lo` on.
struct Table {
    const float *direct;  // zero-point-free output codes
    const int64_t *bounds;
    const int64_t *coefficients;  // (segments, degree + 1)
    int64_t entries;
    int64_t pre_lo, pre_zero;  // first input code of `direct`, zero point of the input
    int64_t segments, degree, shift, last;
    int64_t segment_shift;  // codes of a segment as a power of two, where all have as many
    int64_t lo, hi;         // limits of the output less its zero point
    double scale;           // 2^-shift
    const void *lines;      // see compressed_table.cuh, or null
    int64_t line_origin, line_count;  // zero-point-free input code of the first line
    int64_t least;                    // smallest input code
};

template <class Real>
struct Cell {
    Sum<Real> z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h;
    Sum<Real> zoneout;  // of the state before a step and after it
    Table z, r, g;
    Real one;
    Real Rh_lo, Rh_hi;  // limits with the magic number added
    Real Wx_offset;     // zero point of Wx less its smallest code: what stored codes exceed it by
    int64_t h_zero;
    int64_t h_offset;  // state codes are kept less this in bytes
    int64_t one_integer;
};

// The rounded product, magic number still added.
template <class Real>
inline Real round_term(Real v, Real m) {
    return Magic<Real>::fma(v, m, Magic<Real>::number());
}

template <class Real>
inline Real clamped(const Sum<Real> &s, Real v) {
    return Magic<Real>::limit(v, s.lo, s.hi);
}

template <class Real>
inline Real plain(Real v) {
    return Magic<Real>::plus(v, -Magic<Real>::number());
}

// One term.
template <class Real>
inline Real weighted(const Sum<Real> &s, Real v) {
    return clamped(s, round_term(v, s.m[0]));
}

// One term, a product. QG_POT: its multiplier is a power of two, so that with the first factor,
// which is known first, it is exact: the only rounding is that of the sum, also where the product
// needs more bits than Real has.
template <class Real>
inline Real weighted_product(const Sum<Real> &s, Real a, Real b) {
#if QG_POT
    const Real v = Magic<Real>::fma(Magic<Real>::times(a, s.m[0]), b, Magic<Real>::number());
    return clamped(s, v);
#else
    return weighted(s, Magic<Real>::times(a, b));
#endif
}

// Two terms, magic number still added. Sums that leave 53 bits go through 64-bit integers.
template <class Real>
inline Real weighted(const Sum<Real> &s, Real v1, Real v2) {
#if QG_WORDS
    if (s.in_words) {
        const int64_t total = (int64_t)v1 * s.M[0] + (int64_t)v2 * s.M[1];
        const int64_t rounded = qg_clamp(qg_round(total, (int)s.k), s.low, s.high);
        return Magic<Real>::plus((Real)rounded, Magic<Real>::number());
    }
#endif
    // what comes last needs one instruction; either way the sum is exact
    const Real total = Magic<Real>::fma(v2, s.m[1], Magic<Real>::times(v1, s.m[0]));
    return clamped(s, Magic<Real>::plus(total, Magic<Real>::number()));
}

// What a gate's table has for two terms.
template <class Real, class Of>
inline Real gate_of(const Of &of, const Sum<Real> &s, Real v1, Real v2) {
    return of(weighted(s, v1, v2));
}

// How a kernel reads a table: an entry per code, from shared or from global memory, or quadratics
// of equal length in shared memory, where every step of the sum is exact in double.
constexpr int kDirect = 0, kDistant = 1, kQuadratic = 2;

template <int kMode>
struct Reader {
    const float *direct;  // entry 0 stands at the zero-point-free input code 0
    const double *c;      // [power][segment]
    int first, last, zero, segments, u;
    double scale, lo, hi;

    // Copies what the mode reads into shared memory and returns the first byte after it.
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

    // The zero-point-free output code of a sum that has the magic number inside.
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

// h' with the magic number added, from zero-point-free codes.
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

// A code of any container.
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

// Elements of a group of 16 units and a tile's rows are stored in the order in which threads of the
// recurrent kernel read them: unit lane8 + 8 * row8, row n.
inline int stored_at(int rows, int lane8, int row8, int n) {
    return rows == 8 ? lane8 * 16 + n * 2 + row8 : lane8 * 2 * rows + row8 * rows + n;
}

// Where a sequence stands in memory; kinds: 0 int8, 1 uint8, 2 int16, 3 int32, 4 int64.
struct Sequence {
    const void *x;           // (T, N, C)
    const void *h0;          // (N, H), or null: zero points
    void *out;               // (T, N, H)
    void *last;              // (N, H)
    const int64_t *lengths;  // (N) or null
    void *workspace;
    int64_t x_kind, h_kind;
    int64_t T, N, C, H;
    int64_t reverse;
    const uint8_t *held;  // (T, N, H): units that keep their state in a step, or null
};

// A code of the state before the first step.
inline int64_t first_code(const Sequence &s, int64_t at, int64_t zero) {
    return s.h0 ? read_code(s.h0, s.h_kind, at) : zero;
}

// A projection in plain integers: W x or R h.
struct Matrix {
    const void *codes;     // (3H, K) or, transposed, (K, 3H); int8 or int16 or int32
    const int64_t *bias;   // (3H), in 2^bias_shift accumulator units
    const int64_t *M, *k;  // (3H)
    const double *m;       // (3H), M / 2^k
    int64_t kind;          // of the codes
    int64_t bias_shift;
    int64_t zero;     // zero point of the operand
    int64_t lo, hi;   // limits of the result less its zero point
    int64_t code_lo;  // smallest code of the result less its zero point
};

#endif
