#include "cpu/core/wide.hpp"

#include <algorithm>

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
        const auto half = static_cast<UnsignedWide>(1) << 127;
        const UnsignedWide rest = static_cast<UnsignedWide>(v) << (128 - k);
        v >>= k;
        v += rest > half || (rest == half && (v & 1));
    } else if (k > 127) {
        return 0;
    }
    const Wide limit = QG_WIDE_SATURATED;
    const auto found = static_cast<int64_t>(v < -limit ? -limit : v > limit ? limit : v);
    return k < 0 ? qg_left(found, k < -64 ? 64 : -k) : found;
}

int64_t weighted(const Sum &s, Term t1, Term t2) {
    return rounded(product(t1.a, t1.b) * s.M[0] + product(t2.a, t2.b) * s.M[1], s.k);
}

// (high * 2^16 + low + bias * 2^shift) * M, rounded.
int64_t requantized(int64_t high, int64_t low, int64_t bias, int shift, int64_t M, int k) {
    const Wide one = 1;
    return rounded((product(high, 1 << 16) + low + bias * (one << shift)) * M, k);
}

#else

int64_t weighted(const Sum &s, Term t1, Term t2) {
    const qg_wide v1 = qg_wide_product(t1.a, t1.b), v2 = qg_wide_product(t2.a, t2.b);
    const qg_wide total = qg_wide_add(qg_wide_times_word(v1, static_cast<uint64_t>(s.M[0])),
                                      qg_wide_times_word(v2, static_cast<uint64_t>(s.M[1])));
    return qg_wide_round(total, s.k);
}

int64_t requantized(int64_t high, int64_t low, int64_t bias, int shift, int64_t M, int k) {
    qg_wide total = qg_wide_left(qg_wide_of(bias), shift);
    total = qg_wide_add(total, qg_wide_left(qg_wide_of(high), 16));
    total = qg_wide_add(total, qg_wide_of(low));
    return qg_wide_round(qg_wide_times(total, static_cast<uint32_t>(M)), k);
}

#endif

// A sum of all tiers but e, which is below 2^62 whatever its terms are by themselves.
int64_t sum_of(const Sum &s, Term t1, Term t2) {
    auto scaled = [](int64_t M, Term t) {
        return static_cast<uint64_t>(t.a) * static_cast<uint64_t>(t.b) * static_cast<uint64_t>(M);
    };
    return static_cast<int64_t>(scaled(s.M[0], t1) + scaled(s.M[1], t2));
}

int64_t apply(const Sum &s, Term t1, Term t2) {
    const int64_t found = s.tier == 'e' ? weighted(s, t1, t2) : qg_round(sum_of(s, t1, t2), s.k);
    return qg_clamp(found, s.lo, s.hi);
}

// What a row needs beside its states.
struct Space {
    int32_t *low, *high;    // an operand, whole or in two halves
    int64_t *sums, *sums2;  // (3H)
};

void project(const WideProjection &p, const int64_t *v, int channels, const Space &space,
             void (*multiply)(const WideSums &), int64_t *out) {
    for (int i = 0; i < p.inputs; ++i) {
        space.low[i] = static_cast<int32_t>(p.in_word ? v[i] : v[i] & 0xffff);
        if (!p.in_word) space.high[i] = static_cast<int32_t>(qg_floor_shift(v[i], 16));
    }
    multiply({p.w, space.low, channels, p.inputs, space.sums});
    if (!p.in_word) multiply({p.w, space.high, channels, p.inputs, space.sums2});
    for (int c = 0; c < channels; ++c) {
        const int64_t found = requantized(p.in_word ? 0 : space.sums2[c], space.sums[c], p.bias[c],
                                          p.bias_shift, p.M[c], static_cast<int>(p.k[c]));
        out[c] = qg_clamp(found, p.lo, p.hi);
    }
}

}  // namespace

int64_t polynomial(const Table &t, int segment, int64_t q) {
    const int64_t d = q - t.bounds[segment];
    const int64_t *c = t.coefficients + static_cast<int64_t>(segment) * (t.degree + 1);
    int64_t y = c[t.degree];
    for (int power = t.degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_clamp(qg_round(y, t.shift), t.lo, t.hi);
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
    return 8 * (static_cast<int64_t>(p.W.inputs) + 13 * p.H + longest);
}

void run_wide(const WidePlan &p, const Job &job, void (*multiply)(const WideSums &)) {
    const int H = p.H, C = p.W.inputs;
    int64_t *x = static_cast<int64_t *>(job.workspace);
    int64_t *h = x + C, *Wx = h + H, *Rh = Wx + 3 * H;
    int64_t *const sums = Rh + 3 * H;
    auto *const halves = reinterpret_cast<int32_t *>(sums + 6 * H);
    const Space space = {halves, halves + std::max(C, H), sums, sums + 3 * H};
    for (int64_t row = job.first_row; row < job.end_row; ++row) {
        for (int i = 0; i < H; ++i)
            h[i] = read(job.h0.data, p.h.container, row * job.h0.row + i) - p.R.zero;
        for (int64_t n = 0; n < job.T; ++n) {
            const int64_t step = job.reverse ? job.T - 1 - n : n;
            if (!job.lengths || job.lengths[row] > step) {
                const int64_t start = step * job.x.step + row * job.x.row;
                for (int i = 0; i < C; ++i)
                    x[i] = read(job.x.data, p.x.container, start + i) - p.W.zero;
                project(p.W, x, 3 * H, space, multiply, Wx);
                project(p.R, h, 3 * H, space, multiply, Rh);
                const uint8_t *held = job.held ? job.held + (step * job.N + row) * H : nullptr;
                for (int i = 0; i < H; ++i) {
                    if (held && held[i]) continue;
                    const int64_t z = look_up(p.z, apply(p.z_pre, {Wx[i], 1}, {Rh[i], 1}));
                    const int64_t r = look_up(p.r, apply(p.r_pre, {Wx[H + i], 1}, {Rh[H + i], 1}));
                    Term rest = {r, Rh[2 * H + i]};
                    if (p.rRh.present) rest = {apply(p.rRh, rest, {0, 0}), 1};
                    const int64_t g = look_up(p.g, apply(p.g_pre, {Wx[2 * H + i], 1}, rest));
                    Term old = {z, h[i]}, fresh = {p.one - z, g};
                    if (p.old_contrib.present) old = {apply(p.old_contrib, old, {0, 0}), 1};
                    if (p.new_contrib.present) fresh = {apply(p.new_contrib, fresh, {0, 0}), 1};
                    const int64_t now = apply(p.h_new, old, fresh);
                    const bool keeps = p.zoneout.present && !held;
                    h[i] = keeps ? apply(p.zoneout, {h[i], 1}, {now, 1}) : now;
                }
            }
            const int64_t start = step * job.out.codes_step + row * job.out.codes_row;
            for (int i = 0; i < H; ++i)
                write(job.out.codes, p.h.container, start + i, h[i] + p.R.zero);
        }
        for (int i = 0; i < H; ++i)
            write(job.last.codes, p.h.container, row * job.last.codes_row + i, h[i] + p.R.zero);
    }
}

}  // namespace quant_gru
