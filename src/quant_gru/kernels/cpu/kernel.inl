// The narrow kernel (all widths up to 16 bits), compiled once per instruction set: the including
// file defines QG_NAMESPACE and the function `dot`. Loops over channels are written for the
// compiler's vectorizer; everything is exact, in float32 or float64 fused multiply-adds where the
// plan allows it and in 64-bit integers elsewhere.

#include <cfloat>

#include "../fixed_point.h"
#include "plan.hpp"

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "the kernels are exact only where every float operation is rounded to its own type"
#endif

namespace quant_gru {
namespace QG_NAMESPACE {
namespace {

constexpr int kSteps = 8;  // steps whose input projection is made at once

template <class Real>
struct Magic;
template <>
struct Magic<float> {
    static constexpr float value =
        12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, half-even
    static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};
template <>
struct Magic<double> {
    static constexpr double value = 6755399441055744.;  // 1.5 * 2^52
    static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
};

template <class Real>
inline Real limit(Real v, Real lo, Real hi) {
    v = v < lo ? lo : v;
    return v > hi ? hi : v;
}

// rne(v * m): v an integer below 2^24 (2^53), m = M / 2^k; one rounding. Beyond 2^22 (2^51) the
// result is inexact, but stays beyond every limit.
template <class Real>
inline Real round_term(Real v, Real m) {
    return Magic<Real>::fma(v, m, Magic<Real>::value) - Magic<Real>::value;
}

template <class Real>
inline Real round_sum(Real v1, Real m1, Real v2, Real m2) {
    return (Magic<Real>::fma(v1, m1, v2 * m2) + Magic<Real>::value) - Magic<Real>::value;
}

template <class To>
inline void store(To *out, const int16_t *h, int n, int64_t offset) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<To>(h[i] + static_cast<int32_t>(offset));
}

// One row's operand as int16, `offset` taken off.
template <class From>
inline void load(int16_t *a, const From *x, int n, int64_t offset) {
    for (int i = 0; i < n; ++i)
        a[i] = static_cast<int16_t>(static_cast<int32_t>(x[i]) - static_cast<int32_t>(offset));
}

inline void load_row(int16_t *a, const void *x, Container c, int64_t start, int n, int64_t offset) {
    switch (c) {
        case Container::i8:
            load(a, static_cast<const int8_t *>(x) + start, n, offset);
            break;
        case Container::u8:
            load(a, static_cast<const uint8_t *>(x) + start, n, offset);
            break;
        case Container::i16:
            load(a, static_cast<const int16_t *>(x) + start, n, offset);
            break;
        default:
            load(a, static_cast<const int32_t *>(x) + start, n, offset);
            break;
    }
    if (n & 1) a[n] = 0;
}

inline void store_row(void *out, Container c, int64_t start, const int16_t *h, int n,
                      int64_t offset) {
    switch (c) {
        case Container::i8:
            store(static_cast<int8_t *>(out) + start, h, n, offset);
            break;
        case Container::u8:
            store(static_cast<uint8_t *>(out) + start, h, n, offset);
            break;
        case Container::i16:
            store(static_cast<int16_t *>(out) + start, h, n, offset);
            break;
        default:
            store(static_cast<int32_t *>(out) + start, h, n, offset);
            break;
    }
}

template <class Real>
inline const Real *multipliers(const Projection &p);
template <>
inline const float *multipliers<float>(const Projection &p) {
    return p.m_float;
}
template <>
inline const double *multipliers<double>(const Projection &p) {
    return p.m;
}

// Rows of zero-point-free results (stride: tiles * 16) from rows of int16 operands.
template <class Real>
void project(const Projection &p, const int16_t *a, int64_t a_stride, int rows, Real *out,
             bool small_sums) {
    const int stride = p.tiles * kTile;
    const Real lo = static_cast<Real>(p.lo), hi = static_cast<Real>(p.hi);
    for (int tile = 0; tile < p.tiles; ++tile) {
        const int first = tile * kTile;
        const int64_t *bias = p.bias + first;
        const Real *m = multipliers<Real>(p) + first;
        for (int row = 0; row < rows; row += kDotRows) {
            const int count = rows - row < kDotRows ? rows - row : kDotRows;
            alignas(64) int32_t part[kDotRows * kTile];
            const int16_t *operand = a + row * a_stride;
            if (small_sums) {
                const int16_t *w = p.w[0] + static_cast<int64_t>(tile) * p.pairs * 2 * kTile;
                dot(w, operand, a_stride, count, p.pairs, part);
                for (int r = 0; r < count; ++r) {
                    Real *to = out + static_cast<int64_t>(row + r) * stride + first;
                    for (int c = 0; c < kTile; ++c) {
                        const int32_t v = part[r * kTile + c] + static_cast<int32_t>(bias[c]);
                        to[c] = limit(round_term(static_cast<Real>(v), m[c]), lo, hi);
                    }
                }
                continue;
            }
            int64_t total[kDotRows * kTile];
            for (int i = 0; i < kDotRows * kTile; ++i) total[i] = bias[i % kTile];
            for (int plane = 0; plane < p.planes; ++plane) {
                const int64_t weight = p.planes == 2 && plane == 0 ? 256 : 1;
                for (int pair = 0; pair < p.pairs; pair += p.flush) {
                    const int n = p.pairs - pair < p.flush ? p.pairs - pair : p.flush;
                    const int64_t at = static_cast<int64_t>(tile) * p.pairs + pair;
                    dot(p.w[plane] + at * 2 * kTile, operand + 2 * pair, a_stride, count, n, part);
                    for (int i = 0; i < count * kTile; ++i) total[i] += weight * part[i];
                }
            }
            for (int r = 0; r < count; ++r) {
                Real *to = out + static_cast<int64_t>(row + r) * stride + first;
                for (int c = 0; c < kTile; ++c)
                    to[c] =
                        limit(round_term(static_cast<Real>(total[r * kTile + c]), m[c]), lo, hi);
            }
        }
    }
}

template <class Real>
inline const Real *direct(const Table &t);
template <>
inline const float *direct<float>(const Table &t) {
    return t.direct_float;
}
template <>
inline const double *direct<double>(const Table &t) {
    return t.direct_double;
}

inline int64_t polynomial(const Table &t, int64_t q) {
    int segment;
    if (t.segment_shift >= 0) {
        segment = static_cast<int>((q - t.first) >> t.segment_shift);
    } else {
        int low = 0, high = t.segments - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (t.bounds[middle] <= q)
                low = middle;
            else
                high = middle - 1;
        }
        segment = low;
    }
    const int64_t d = q - t.bounds[segment];
    const int64_t *c = t.coefficients + static_cast<int64_t>(segment) * (t.degree + 1);
    int64_t y = c[t.degree];
    for (int power = t.degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_clamp(qg_round(y, t.shift), t.lo, t.hi);
}

// v: zero-point-free input codes; becomes zero-point-free output codes.
template <class Real>
void look_up(const Table &t, Real *v, int n) {
    const int32_t zero = static_cast<int32_t>(t.pre_zero);
    const int32_t first = static_cast<int32_t>(t.first), last = static_cast<int32_t>(t.last);
    const Real *entries = direct<Real>(t);
    if (entries) {
        for (int i = 0; i < n; ++i) {
            int32_t q = static_cast<int32_t>(v[i]) + zero;
            q = q < first ? first : q > last ? last : q;
            v[i] = entries[q - first];
        }
        return;
    }
    if (t.exact_double) {
        const double *c0 = t.exact_double, *c1 = c0 + t.segments, *c2 = c1 + t.segments;
        const double lo = static_cast<double>(t.lo), hi = static_cast<double>(t.hi);
        const int u = t.segment_shift;
        for (int i = 0; i < n; ++i) {
            int32_t q = static_cast<int32_t>(v[i]) + zero;
            q = (q < first ? first : q > last ? last : q) - first;
            const int32_t segment = q >> u;
            const double d = static_cast<double>(q - (segment << u));
            const double y = (c2[segment] * d + c1[segment]) * d + c0[segment];
            v[i] = static_cast<Real>(limit(round_term(y, t.scale), lo, hi));
        }
        return;
    }
    for (int i = 0; i < n; ++i) {
        int32_t q = static_cast<int32_t>(v[i]) + zero;
        q = q < first ? first : q > last ? last : q;
        v[i] = static_cast<Real>(polynomial(t, q));
    }
}

// out = sum of a and of b or b * c; tier d goes through 64-bit integers.
template <class Real, bool kProductA, bool kProductB>
void add(const Sum &s, const Real *a, const Real *a2, const Real *b, const Real *b2, Real *out,
         int n) {
    const Real lo = static_cast<Real>(s.lo), hi = static_cast<Real>(s.hi);
    if (s.tier == 'd') {
        for (int i = 0; i < n; ++i) {
            int64_t v1 = static_cast<int64_t>(a[i]), v2 = static_cast<int64_t>(b[i]);
            if (kProductA) v1 *= static_cast<int64_t>(a2[i]);
            if (kProductB) v2 *= static_cast<int64_t>(b2[i]);
            const int64_t v = qg_round(v1 * s.M[0] + v2 * s.M[1], s.k);
            out[i] = static_cast<Real>(qg_clamp(v, s.lo, s.hi));
        }
        return;
    }
    const Real m1 = static_cast<Real>(s.m[0]), m2 = static_cast<Real>(s.m[1]);
    for (int i = 0; i < n; ++i) {
        const Real v1 = kProductA ? a[i] * a2[i] : a[i], v2 = kProductB ? b[i] * b2[i] : b[i];
        out[i] = limit(round_sum(v1, m1, v2, m2), lo, hi);
    }
}

template <class Real>
void multiply(const Sum &s, const Real *a, const Real *b, Real *out, int n) {
    const Real lo = static_cast<Real>(s.lo), hi = static_cast<Real>(s.hi);
    const Real m = static_cast<Real>(s.m[0]);
    for (int i = 0; i < n; ++i) out[i] = limit(round_term(a[i] * b[i], m), lo, hi);
}

template <class Real>
void gates(const NarrowPlan &p, const Real *Wx, const Real *Rh, Real *h, Real *t) {
    const int H = p.H;
    Real *z = t, *r = t + H, *g = t + 2 * H, *rest = t + 3 * H, *old = t + 4 * H,
         *fresh = t + 5 * H;
    add<Real, false, false>(p.z_pre, Wx, nullptr, Rh, nullptr, z, H);
    look_up(p.z, z, H);
    add<Real, false, false>(p.r_pre, Wx + H, nullptr, Rh + H, nullptr, r, H);
    look_up(p.r, r, H);
    if (p.rRh.present) {
        multiply(p.rRh, r, Rh + 2 * H, rest, H);
        add<Real, false, false>(p.g_pre, Wx + 2 * H, nullptr, rest, nullptr, g, H);
    } else {
        add<Real, false, true>(p.g_pre, Wx + 2 * H, nullptr, r, Rh + 2 * H, g, H);
    }
    look_up(p.g, g, H);
    const Real one = static_cast<Real>(p.one);
    for (int i = 0; i < H; ++i) rest[i] = one - z[i];
    if (p.old_contrib.present) multiply(p.old_contrib, z, h, old, H);
    if (p.new_contrib.present) multiply(p.new_contrib, rest, g, fresh, H);
    if (p.old_contrib.present && p.new_contrib.present)
        add<Real, false, false>(p.h, old, nullptr, fresh, nullptr, h, H);
    else if (p.old_contrib.present)
        add<Real, false, true>(p.h, old, nullptr, rest, g, h, H);
    else if (p.new_contrib.present)
        add<Real, true, false>(p.h, z, h, fresh, nullptr, h, H);
    else
        add<Real, true, true>(p.h, z, h, rest, g, h, H);
}

template <class Real>
void run_rows(const NarrowPlan &p, const Job &job, int64_t first_row, int rows) {
    const int H = p.H;
    const int64_t wx_stride = static_cast<int64_t>(p.W.tiles) * kTile;
    const int64_t rh_stride = static_cast<int64_t>(p.R.tiles) * kTile;
    const int64_t x_stride = 2 * p.W.pairs, h_stride = 2 * p.R.pairs;
    char *space = static_cast<char *>(job.workspace);
    auto take = [&space](int64_t bytes) {
        char *p = space;
        space += (bytes + 63) / 64 * 64;
        return p;
    };
    Real *Wx = reinterpret_cast<Real *>(take(kSteps * kRows * wx_stride * 8));
    Real *Rh = reinterpret_cast<Real *>(take(kRows * rh_stride * 8));
    Real *h = reinterpret_cast<Real *>(take(static_cast<int64_t>(kRows) * H * 8));
    Real *t = reinterpret_cast<Real *>(take(static_cast<int64_t>(H) * 6 * 8));
    int16_t *x16 = reinterpret_cast<int16_t *>(take(kSteps * kRows * x_stride * 2));
    int16_t *h16 = reinterpret_cast<int16_t *>(take(kRows * h_stride * 2));

    const int64_t h_offset = p.R.offset;
    for (int row = 0; row < rows; ++row) {
        load_row(h16 + row * h_stride, job.h0, p.h_container, (first_row + row) * H, H, h_offset);
        for (int i = 0; i < H; ++i)
            h[row * H + i] = static_cast<Real>(h16[row * h_stride + i] + h_offset - p.h_zero);
    }
    for (int64_t block = 0; block < job.T; block += kSteps) {
        const int steps = static_cast<int>(job.T - block < kSteps ? job.T - block : kSteps);
        for (int s = 0; s < steps; ++s) {
            const int64_t step = job.reverse ? job.T - 1 - (block + s) : block + s;
            for (int row = 0; row < rows; ++row) {
                const int64_t start = (step * job.N + first_row + row) * p.W.inputs;
                load_row(x16 + (s * rows + row) * x_stride, job.x, p.x_container, start, p.W.inputs,
                         p.W.offset);
            }
        }
        project(p.W, x16, x_stride, steps * rows, Wx, p.small_sums);
        for (int s = 0; s < steps; ++s) {
            const int64_t step = job.reverse ? job.T - 1 - (block + s) : block + s;
            project(p.R, h16, h_stride, rows, Rh, p.small_sums);
            for (int row = 0; row < rows; ++row) {
                int16_t *codes = h16 + row * h_stride;
                if (!job.lengths || job.lengths[first_row + row] > step) {
                    Real *state = h + static_cast<int64_t>(row) * H;
                    gates(p, Wx + (s * rows + row) * wx_stride, Rh + row * rh_stride, state, t);
                    const int32_t shift = static_cast<int32_t>(p.h_zero - h_offset);
                    for (int i = 0; i < H; ++i)
                        codes[i] = static_cast<int16_t>(static_cast<int32_t>(state[i]) + shift);
                }
                const int64_t at = (step * job.N + first_row + row) * H;
                store_row(job.out, p.h_container, at, codes, H, h_offset);
            }
        }
    }
    for (int row = 0; row < rows; ++row)
        store_row(job.last, p.h_container, (first_row + row) * H, h16 + row * h_stride, H,
                  h_offset);
}

// clamp(rint(x / s), lo, hi) + z: a float32 division, ties to even.
template <class To>
bool quantize_to(const Border &b, const float *x, To *codes) {
    const float s = b.scale, lo = static_cast<float>(b.lo), hi = static_cast<float>(b.hi);
    int nan = 0;
    for (int64_t i = 0; i < b.count; ++i) {
        const float y = x[i] / s;
        nan |= y != y;
        // clamping first is the same, for the limits are integers; NaN becomes 0
        const float inside = y != y ? 0.f : limit(y, lo, hi);
        const float rounded = (inside + Magic<float>::value) - Magic<float>::value;
        codes[i] = static_cast<To>(static_cast<int32_t>(rounded) + b.zero);
    }
    return nan != 0;
}

template <class From>
void dequantize_from(const Border &b, const From *codes, float *x) {
    for (int64_t i = 0; i < b.count; ++i)
        x[i] = b.scale * static_cast<float>(static_cast<int32_t>(codes[i]) - b.zero);
}

}  // namespace

void run(const NarrowPlan &plan, const Job &job) {
    for (int64_t row = job.first_row; row < job.end_row; row += kRows) {
        const int64_t left = job.end_row - row;
        const int rows = static_cast<int>(left < kRows ? left : kRows);
        if (plan.in_float)
            run_rows<float>(plan, job, row, rows);
        else
            run_rows<double>(plan, job, row, rows);
    }
}

bool quantize(const Border &border, const float *x, void *codes) {
    switch (border.container) {
        case Container::i8:
            return quantize_to(border, x, static_cast<int8_t *>(codes));
        case Container::u8:
            return quantize_to(border, x, static_cast<uint8_t *>(codes));
        case Container::i16:
            return quantize_to(border, x, static_cast<int16_t *>(codes));
        default:
            return quantize_to(border, x, static_cast<int32_t *>(codes));
    }
}

void dequantize(const Border &border, const void *codes, float *x) {
    switch (border.container) {
        case Container::i8:
            dequantize_from(border, static_cast<const int8_t *>(codes), x);
            break;
        case Container::u8:
            dequantize_from(border, static_cast<const uint8_t *>(codes), x);
            break;
        case Container::i16:
            dequantize_from(border, static_cast<const int16_t *>(codes), x);
            break;
        default:
            dequantize_from(border, static_cast<const int32_t *>(codes), x);
            break;
    }
}

}  // namespace QG_NAMESPACE
}  // namespace quant_gru
