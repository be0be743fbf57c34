#include "cpu/core/wide.hpp"

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

int64_t apply(const Sum &s, Term t1, Term t2) {
    const qg_wide v1 = qg_wide_product(t1.a, t1.b), v2 = qg_wide_product(t2.a, t2.b);
    const qg_wide total = qg_wide_add(qg_wide_times_word(v1, static_cast<uint64_t>(s.M[0])),
                                      qg_wide_times_word(v2, static_cast<uint64_t>(s.M[1])));
    return qg_clamp(qg_wide_round(total, s.k), s.lo, s.hi);
}

void project(const WideProjection &p, const int64_t *v, int channels, int64_t *out) {
    for (int c = 0; c < channels; ++c) {
        const int32_t *w = p.w + static_cast<int64_t>(c) * p.inputs;
        qg_wide total = qg_wide_left(qg_wide_of(p.bias[c]), p.bias_shift);
        for (int i = 0; i < p.inputs; ++i) total = qg_wide_add(total, qg_wide_product(w[i], v[i]));
        total = qg_wide_times(total, static_cast<uint32_t>(p.M[c]));
        out[c] = qg_clamp(qg_wide_round(total, static_cast<int>(p.k[c])), p.lo, p.hi);
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
    return 8 * (static_cast<int64_t>(p.W.inputs) + 8 * p.H);
}

void run_wide(const WidePlan &p, const Job &job) {
    const int H = p.H, C = p.W.inputs;
    int64_t *x = static_cast<int64_t *>(job.workspace);
    int64_t *h = x + C, *Wx = h + H, *Rh = Wx + 3 * H;
    for (int64_t row = job.first_row; row < job.end_row; ++row) {
        for (int i = 0; i < H; ++i)
            h[i] = read(job.h0.data, p.h.container, row * job.h0.row + i) - p.R.zero;
        for (int64_t n = 0; n < job.T; ++n) {
            const int64_t step = job.reverse ? job.T - 1 - n : n;
            if (!job.lengths || job.lengths[row] > step) {
                const int64_t start = step * job.x.step + row * job.x.row;
                for (int i = 0; i < C; ++i)
                    x[i] = read(job.x.data, p.x.container, start + i) - p.W.zero;
                project(p.W, x, 3 * H, Wx);
                project(p.R, h, 3 * H, Rh);
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
