#include "cpu/core/wide.hpp"

#include <algorithm>
#include <cmath>

#include "c99/fixed_point.h"

namespace quant_gru {
namespace {

int64_t read(const void *p, Container c, int64_t i) {
    switch (c) {
        case Container::i8:
            return static_cast<const int8_t *>(p)[i];
        case Container::u8:
            return static_cast<const uint8_t *>(p)[i];
        case Container::i16:
            return static_cast<const int16_t *>(p)[i];
        case Container::i32:
            return static_cast<const int32_t *>(p)[i];
        default:
            return static_cast<const int64_t *>(p)[i];
    }
}

void write(void *p, Container c, int64_t i, int64_t v) {
    switch (c) {
        case Container::i8:
            static_cast<int8_t *>(p)[i] = static_cast<int8_t>(v);
            break;
        case Container::u8:
            static_cast<uint8_t *>(p)[i] = static_cast<uint8_t>(v);
            break;
        case Container::i16:
            static_cast<int16_t *>(p)[i] = static_cast<int16_t>(v);
            break;
        case Container::i32:
            static_cast<int32_t *>(p)[i] = static_cast<int32_t>(v);
            break;
        default:
            static_cast<int64_t *>(p)[i] = v;
            break;
    }
}

// A term: a code, or a product of two.
struct Term {
    int64_t a, b;
};

#if defined(__SIZEOF_INT128__)

__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

inline Wide product(int64_t a, int64_t b) { return static_cast<Wide>(a) * b; }

// rne(v / 2^k), saturated as qg_wide_round is.
inline int64_t rounded(Wide v, int k) {
    if (k > 0 && k < 128) {
        // the remainder at the top of two words, and one more where the quotient is odd: it is
        // rounded up where that is above one half; without a branch, which would be random
        UnsignedWide rest = static_cast<UnsignedWide>(v) << (128 - k);
        v >>= k;
        rest += static_cast<UnsignedWide>(v) & 1;
        const auto high = static_cast<uint64_t>(rest >> 64), low = static_cast<uint64_t>(rest);
        v += static_cast<int64_t>(high >> 63 & uint64_t{(high << 1 | low) != 0});
    } else if (k > 127) {
        return 0;
    }
    const Wide limit = QG_WIDE_SATURATED;
    const auto found = static_cast<int64_t>(v < -limit ? -limit : v > limit ? limit : v);
    return k < 0 ? qg_left(found, k < -64 ? 64 : -k) : found;
}

// v / 2^k for k >= 0, by any rule but those with ties to even and in two steps.
inline Wide shifted(Wide v, int k, int rule) {
    if (k == 0) return v;
    if (k > 127) return rule == QG_FLOOR && v < 0 ? -1 : 0;
    const UnsignedWide rest = static_cast<UnsignedWide>(v) << (128 - k);
    const UnsignedWide half = static_cast<UnsignedWide>(1) << 127;
    v >>= k;
    if (rule == QG_FLOOR) return v;
    return v + (rule == QG_HALF_AWAY && v < 0 ? rest > half : rest >= half);
}

// As qg_wide_round_by.
inline int64_t rounded(Wide v, int k, int rule, int first) {
    if (k <= 0 || rule == QG_HALF_EVEN) return rounded(v, k);
    if (rule != QG_DOUBLE) return rounded(shifted(v, k, rule), 0);
    first = std::min(first, k);
    return rounded(shifted(shifted(v, first, QG_HALF_UP), k - first, QG_HALF_AWAY), 0);
}

int64_t weighted(const Sum &s, Term t1, Term t2) {
    return rounded(product(t1.a, t1.b) * s.M[0] + product(t2.a, t2.b) * s.M[1], s.k, s.rule,
                   s.first);
}

// (high * 2^16 + low + bias * 2^shift) * M, rounded.
int64_t requantized(int64_t high, int64_t low, int64_t bias, const WideProjection &p, int c) {
    const Wide one = 1;
    return rounded((product(high, 1 << 16) + low + bias * (one << p.bias_shift)) * p.M[c],
                   static_cast<int>(p.k[c]), p.rule, p.first);
}

#else

int64_t weighted(const Sum &s, Term t1, Term t2) {
    const qg_wide v1 = qg_wide_product(t1.a, t1.b), v2 = qg_wide_product(t2.a, t2.b);
    const qg_wide total = qg_wide_add(qg_wide_times_word(v1, static_cast<uint64_t>(s.M[0])),
                                      qg_wide_times_word(v2, static_cast<uint64_t>(s.M[1])));
    return qg_wide_round_by(total, s.k, s.rule, s.first);
}

int64_t requantized(int64_t high, int64_t low, int64_t bias, const WideProjection &p, int c) {
    qg_wide total = qg_wide_left(qg_wide_of(bias), p.bias_shift);
    total = qg_wide_add(total, qg_wide_left(qg_wide_of(high), 16));
    total = qg_wide_add(total, qg_wide_of(low));
    return qg_wide_round_by(qg_wide_times(total, static_cast<uint32_t>(p.M[c])),
                            static_cast<int>(p.k[c]), p.rule, p.first);
}

#endif

// A sum of all tiers but e, which is below 2^62 whatever its terms are by themselves.
int64_t sum_of(const Sum &s, Term t1, Term t2) {
    auto scaled = [](int64_t M, Term t) {
        return static_cast<uint64_t>(t.a) * static_cast<uint64_t>(t.b) * static_cast<uint64_t>(M);
    };
    return static_cast<int64_t>(scaled(s.M[0], t1) + scaled(s.M[1], t2));
}

// A value within limits; `inside` becomes whether that is the value itself.
int64_t clamped(int64_t v, int64_t lo, int64_t hi, bool &inside) {
    const int64_t limited = qg_clamp(v, lo, hi);
    inside = limited == v;
    return limited;
}

int64_t apply(const Sum &s, Term t1, Term t2, bool &inside) {
    const int64_t found =
        s.tier == 'e' ? weighted(s, t1, t2) : qg_round_by(sum_of(s, t1, t2), s.k, s.rule, s.first);
    return clamped(found, s.lo, s.hi, inside);
}

// A product as its own code, or unrounded where it is fused.
Term product_term(const Sum &s, int64_t a, int64_t b, bool &inside) {
    inside = true;
    return s.present ? Term{apply(s, {a, b}, {0, 0}, inside), 1} : Term{a, b};
}

// The codes of one unit in a step, and where no clamp changed them.
struct Unit {
    int64_t z, r, g, Rh_g, h;
    struct {
        bool wx[3], rh[3], z, r, g, rest, old, fresh, h;
    } in;
};

// The equations of the cell. Wx, Rh: (3H), before their clamp; h: of the unit, before the step.
inline Unit unit_of(const WidePlan &p, const int64_t *Wx, const int64_t *Rh, int64_t h) {
    const int H = p.H;
    Unit u;
    int64_t x[3], s[3];
    for (int gate = 0; gate < 3; ++gate) {
        x[gate] = clamped(Wx[gate * H], p.W.lo, p.W.hi, u.in.wx[gate]);
        s[gate] = clamped(Rh[gate * H], p.R.lo, p.R.hi, u.in.rh[gate]);
    }
    u.Rh_g = s[2];
    u.z = look_up(p.z, apply(p.z_pre, {x[0], 1}, {s[0], 1}, u.in.z));
    u.r = look_up(p.r, apply(p.r_pre, {x[1], 1}, {s[1], 1}, u.in.r));
    const Term rest = product_term(p.rRh, u.r, s[2], u.in.rest);
    u.g = look_up(p.g, apply(p.g_pre, {x[2], 1}, rest, u.in.g));
    const Term old = product_term(p.old_contrib, u.z, h, u.in.old);
    const Term fresh = product_term(p.new_contrib, p.one - u.z, u.g, u.in.fresh);
    u.h = apply(p.h_new, old, fresh, u.in.h);
    return u;
}

void project(const WideProjection &p, const int64_t *v, int rows, int channels,
             const WideSpace &space, MultiplyWide multiply, int64_t *out) {
    const int64_t operands = static_cast<int64_t>(rows) * p.inputs;
    for (int64_t i = 0; i < operands; ++i) {
        space.low[i] = static_cast<int32_t>(p.in_word ? v[i] : v[i] & 0xffff);
        if (!p.in_word) space.high[i] = static_cast<int32_t>(qg_floor_shift(v[i], 16));
    }
    multiply({p.w, space.low, channels, p.inputs, rows, space.sums});
    if (!p.in_word) multiply({p.w, space.high, channels, p.inputs, rows, space.sums2});
    const int64_t *high = space.sums2, *low = space.sums;
    for (int r = 0; r < rows; ++r, high += channels, low += channels, out += channels)
        for (int c = 0; c < channels; ++c)
            out[c] = requantized(p.in_word ? 0 : high[c], low[c], p.bias[c], p, c);
}

}  // namespace

int64_t polynomial(const Table &t, int segment, int64_t q) {
    const int64_t d = q - t.bounds[segment];
    const int64_t *c = t.coefficients + static_cast<int64_t>(segment) * (t.degree + 1);
    int64_t y = c[t.degree];
    for (int power = t.degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_clamp(qg_round_by(y, t.shift, t.rule, t.shift), t.lo, t.hi);
}

int64_t look_up(const Table &t, int64_t v) {
    const int64_t q = qg_clamp(v + t.pre_zero, t.first, t.last);
    if (t.segment_shift >= 0) {
        const int64_t segment = (q - t.first) >> t.segment_shift;
        return polynomial(t, static_cast<int>(segment), q);
    }
    int low = 0, high = t.segments - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (t.bounds[middle] <= q)
            low = middle;
        else
            high = middle - 1;
    }
    return polynomial(t, low, q);
}

int64_t workspace_bytes(const WidePlan &p) {
    const int64_t longest = std::max(p.W.inputs, p.H);
    return kWideRows * 8 * (static_cast<int64_t>(p.W.inputs) + 13 * p.H + longest);
}

WideSpace wide_space(const WidePlan &p, void *workspace) {
    const int64_t H = kWideRows * static_cast<int64_t>(p.H);
    const int64_t C = kWideRows * static_cast<int64_t>(p.W.inputs);
    WideSpace s;
    s.x = static_cast<int64_t *>(workspace);
    s.h = s.x + C;
    s.Wx = s.h + H;
    s.Rh = s.Wx + 3 * H;
    s.sums = s.Rh + 3 * H;
    s.sums2 = s.sums + 3 * H;
    s.low = reinterpret_cast<int32_t *>(s.sums2 + 3 * H);
    s.high = s.low + std::max(C, H);
    return s;
}

void read_codes(const void *from, Container container, int64_t first, int64_t zero, int n,
                int64_t *to) {
    for (int i = 0; i < n; ++i) to[i] = read(from, container, first + i) - zero;
}

void project_wide(const WidePlan &p, const WideSpace &space, int rows, MultiplyWide multiply) {
    project(p.W, space.x, rows, 3 * p.H, space, multiply, space.Wx);
    project(p.R, space.h, rows, 3 * p.H, space, multiply, space.Rh);
}

void record_item(const WidePlan &p, const int64_t *Wx, const int64_t *Rh, const int64_t *h,
                 const WideItem &item) {
    const Clamps &in = item.in;
    for (int i = 0; i < p.H; ++i) {
        const Unit u = unit_of(p, Wx + i, Rh + i, h[i]);
        item.z[i] = static_cast<double>(u.z);
        item.r[i] = static_cast<double>(u.r);
        item.g[i] = static_cast<double>(u.g);
        item.Rh_g[i] = static_cast<double>(u.Rh_g);
        for (int gate = 0; gate < 3; ++gate) {
            in.wx[gate * p.H + i] = u.in.wx[gate];
            in.rh[gate * p.H + i] = u.in.rh[gate];
        }
        in.z[i] = u.in.z;
        in.r[i] = u.in.r;
        in.g[i] = u.in.g;
        in.rest[i] = u.in.rest;
        in.old[i] = u.in.old;
        in.fresh[i] = u.in.fresh;
        in.h[i] = u.in.h;
    }
}

namespace {

// The state of a row after a step, in place of the one before it.
void advance(const WidePlan &p, const int64_t *Wx, const int64_t *Rh, const uint8_t *held,
             int64_t *h) {
    bool inside;
    for (int i = 0; i < p.H; ++i) {
        if (held && held[i]) continue;
        const int64_t now = unit_of(p, Wx + i, Rh + i, h[i]).h;
        const bool keeps = p.zoneout.present && !held;
        h[i] = keeps ? apply(p.zoneout, {h[i], 1}, {now, 1}, inside) : now;
    }
}

// A quotient of float32 numbers, rounded. Adding a half to it is exact where that matters.
double rounded_real(double y, int rule) {
    switch (rule) {
        case QG_HALF_EVEN:
            return std::nearbyint(y);
        case QG_HALF_AWAY:
            return std::trunc(y + std::copysign(0.5, y));
        default:
            return std::floor(rule == QG_FLOOR ? y : y + 0.5);
    }
}

// Zero-point-free codes of real values: clamp(round(x / scale)). Returns whether one was NaN.
bool quantize_row(const float *x, int n, const Quantizer &q, const WideProjection &p, int64_t *to) {
    const auto lo = static_cast<double>(p.least + p.moved);
    const auto hi = static_cast<double>(p.most + p.moved);
    bool nan = false;
    for (int i = 0; i < n; ++i) {
        const double v = rounded_real(x[i] / q.scale, q.rule);
        const bool is_nan = v != v;
        nan |= is_nan;
        to[i] = is_nan ? 0 : static_cast<int64_t>(v < lo ? lo : v > hi ? hi : v) - p.moved;
    }
    return nan;
}

// A row of x or h, zero-point-free. Returns whether a value was NaN.
bool read_operand(const Source &from, int64_t first, const Quantizer &q, const WideProjection &p,
                  int n, int64_t *to) {
    if (!from.data) {
        std::fill_n(to, n, 0);
        return false;
    }
    if (from.real) return quantize_row(static_cast<const float *>(from.data) + first, n, q, p, to);
    read_codes(from.data, q.container, first, p.zero, n, to);
    return false;
}

void write_state(const WidePlan &p, const int64_t *h, const Sink &to, int64_t step, int64_t row) {
    if (to.codes) {
        const int64_t start = step * to.codes_step + row * to.codes_row;
        for (int i = 0; i < p.H; ++i) write(to.codes, p.h.container, start + i, h[i] + p.R.zero);
    }
    if (to.real) {
        float *const real = to.real + step * to.real_step + row * to.real_row;
        for (int i = 0; i < p.H; ++i) real[i] = static_cast<float>(h[i]) * p.h.scale;
    }
}

}  // namespace

bool run_wide(const WidePlan &p, const Job &job, MultiplyWide multiply) {
    const int H = p.H, C = p.W.inputs;
    const WideSpace space = wide_space(p, job.workspace);
    bool nan = false;
    for (int64_t first = job.first_row; first < job.end_row; first += kWideRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kWideRows, job.end_row - first));
        for (int r = 0; r < rows; ++r)
            nan |= read_operand(job.h0, (first + r) * job.h0.row, p.h, p.R, H, space.h + r * H);
        for (int64_t n = 0; n < job.T; ++n) {
            const int64_t step = job.reverse ? job.T - 1 - n : n;
            for (int r = 0; r < rows; ++r)
                nan |= read_operand(job.x, step * job.x.step + (first + r) * job.x.row, p.x, p.W, C,
                                    space.x + r * C);
            project_wide(p, space, rows, multiply);
            for (int r = 0; r < rows; ++r) {
                const int64_t row = first + r;
                const uint8_t *held = job.held ? job.held + (step * job.N + row) * H : nullptr;
                int64_t *const h = space.h + r * H;
                if (!job.lengths || job.lengths[row] > step)
                    advance(p, space.Wx + r * 3 * H, space.Rh + r * 3 * H, held, h);
                write_state(p, h, job.out, step, row);
            }
        }
        for (int r = 0; r < rows; ++r) write_state(p, space.h + r * H, job.last, 0, first + r);
    }
    return nan;
}

}  // namespace quant_gru
