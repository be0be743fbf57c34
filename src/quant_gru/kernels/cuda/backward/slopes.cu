// The slopes of every element and step: gates are made again from both products, with the
// arithmetic of the forward, and so is whether a value was clamped, which stops its gradient.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, QG_ZONEOUT, TZ, TR, TG: as for the recurrence
//   BYTES       all weights and activations of both products are bytes
//   HALF        slopes are stored in half precision
//   DIRS        directions of a launch
#include "backward.cuh"

typedef REAL Real;

struct Projected {
    const int32_t *product;   // (planes of the activation * rows, columns)
    const Channel *channels;  // (3H)
    int64_t columns, planes, weight_planes;
    double lo, hi;  // limits of the result less its zero point
};

struct Numbers {
    Projected W, R;
    const void *out, *h0;    // codes of the states after each step; before the first, or null for 0
    const int64_t *lengths;  // (N) or null
    const uint8_t *held;     // (T * N, H) or null
    Slopes *of_R, *of_W;     // (T * N, H): of the state before and R h; of W x
    int64_t h_kind, T, N, H, reverse;
    int64_t first, rows;  // of this chunk
    float s_z, s_r, s_g, s_h, s_Rh;
    Cell<Real> cell;
};
struct Pair {
    Numbers d[DIRS];
};

// A result with the magic number added, and 1 where it was not clamped.
struct Watched {
    Real v;
    float inside;
};

inline Watched watched(const Sum<Real> &s, Real v) {
    const Real sum = round_term(v, s.m[0]), limited = clamped(s, sum);
    return {limited, sum == limited ? 1.f : 0.f};
}

inline Watched watched(const Sum<Real> &s, Real v1, Real v2) {
#if QG_WORDS
    if (s.in_words) {
        const int64_t total = (int64_t)v1 * s.M[0] + (int64_t)v2 * s.M[1];
        const int64_t sum = qg_round(total, (int)s.k), limited = qg_clamp(sum, s.low, s.high);
        return {Magic<Real>::plus((Real)limited, Magic<Real>::number()),
                sum == limited ? 1.f : 0.f};
    }
#endif
    const Real total = Magic<Real>::fma(v1, s.m[0], Magic<Real>::times(v2, s.m[1]));
    const Real sum = Magic<Real>::plus(total, Magic<Real>::number()), limited = clamped(s, sum);
    return {limited, sum == limited ? 1.f : 0.f};
}

inline Watched rounded(double sum, double m, double lo, double hi) {
    const double v = round_term(sum, m);
    const double limited =
        Magic<double>::limit(v, lo + Magic<double>::number(), hi + Magic<double>::number());
    return {(Real)plain(limited), v == limited ? 1.f : 0.f};
}

// A channel of W x or R h: what stays from row to row, and from sums to zero-point-free codes, the
// magic number taken off.
struct Column {
    const Projected *p;
    int64_t channel;
#if BYTES
    int folded, exact;
    float m, lo, hi;
#else
    Channel c;
#endif

    inline void open(const Projected &from, int64_t of) {
        p = &from;
        channel = of;
        const Channel found = from.channels[of];
#if BYTES
        folded = (int)found.folded;
        exact = sizeof(Real) == 4 && found.exact;
        m = found.m_float;
        lo = (float)p->lo + Magic<float>::number();
        hi = (float)p->hi + Magic<float>::number();
#else
        c = found;
#endif
    }

#if BYTES
    typedef int Sums;
    inline Sums load(int64_t row, int64_t, int64_t) const {
        return p->product[row * p->columns + channel];
    }
    inline Watched operator()(int sum) const {
        if (__builtin_expect(!exact, 0)) {
            const Channel c = p->channels[channel];
            return rounded((double)(sum + c.folded), c.m, p->lo, p->hi);
        }
        const float v = round_term((float)(sum + folded), m);
        const float limited = Magic<float>::limit(v, lo, hi);
        return {(Real)plain(limited), v == limited ? 1.f : 0.f};
    }
#else
    typedef int64_t Sums;
    inline int64_t of_plane(const int32_t *v, int64_t H) const {
        if (p->weight_planes == 1) return v[channel];
        return 256 * (int64_t)v[channel] + v[3 * H + channel] + 128 * (int64_t)v[6 * H];
    }
    inline Sums load(int64_t row, int64_t H, int64_t rows) const {
        const int32_t *const v = p->product + row * p->columns;
        const int64_t sum = of_plane(v, H);
        return p->planes == 1 ? sum : 256 * sum + of_plane(v + rows * p->columns, H);
    }
    inline Watched operator()(int64_t sum) const {
        return rounded((double)(sum + c.folded), c.m, p->lo, p->hi);
    }
#endif
};

struct Element {
    Column::Sums Wx[3], Rh[3];
    int h;
    bool stays;
};

// A block: some rows of 32 units.
extern "C" __global__ void __launch_bounds__(256, BYTES ? 3 : 1)
    slopes_of(const __grid_constant__ Pair pair) {
    follow_previous();
    const Numbers &p = pair.d[blockIdx.y % DIRS];
    typedef Magic<Real> R;
    QG_SHARED(memory);
    Reader<TZ> z_of;
    Reader<TR> r_of;
    Reader<TG> g_of;
    g_of.open(p.cell.g, r_of.open(p.cell.r, z_of.open(p.cell.z, memory)));
    __syncthreads();
    const Cell<Real> &c = p.cell;
    const int64_t H = p.H, N = p.N, unit = (int64_t)(blockIdx.y / DIRS) * 32 + threadIdx.x % 32;
    if (unit >= H) return;
    Column of_Wx[3], of_Rh[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        of_Wx[gate].open(p.W, gate * H + unit);
        of_Rh[gate].open(p.R, gate * H + unit);
    }
    const auto load = [&](Element &to, int64_t local) {
        const int64_t row = p.first + local;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            to.Wx[gate] = of_Wx[gate].load(local, H, p.rows);
            to.Rh[gate] = of_Rh[gate].load(local, H, p.rows);
        }
        int64_t from = p.reverse ? row + N : row - N;
        const void *states = p.out;
        if (from < 0 || from >= p.T * N) {
            states = p.h0;
            from = p.reverse ? from - p.T * N : from + N;
        }
        if (!states) {
            to.h = (int)p.cell.h_zero;
        } else {
#if BYTES
            // nothing is done with it yet: that would wait for it
            to.h = ((const uint8_t *)states)[from * H + unit];
#else
            to.h = (int)read_code(states, p.h_kind, from * H + unit);
#endif
        }
        to.stays = p.lengths && row / N >= p.lengths[row % N];
        if (p.held) to.stays = to.stays || p.held[row * H + unit];
    };
#if QG_ZONEOUT
    // of dL/dh', what goes straight to the state before, and the rest
    const float share = p.held ? 0.f : (float)c.zoneout.m[0];
    const float rest_of_it = p.held ? 1.f : (float)c.zoneout.m[1];
#endif
    const int64_t step = (int64_t)gridDim.x * 8;
    int64_t local = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    Element ahead;
    if (local < p.rows) load(ahead, local);
    for (; local < p.rows; local += step) {
        const Element now = ahead;
        const int64_t at = (p.first + local) * H + unit;
        // stores below could be to anything: the next row is read before them
        if (local + step < p.rows) load(ahead, local + step);
        if (now.stays) {
            p.of_R[at] = slopes(1.f, 0.f, 0.f, 0.f);
            p.of_W[at] = slopes(0.f, 0.f, 0.f, 0.f);
            continue;
        }
        const int code = BYTES && p.h_kind == 0 ? (int)(int8_t)now.h : now.h;
        const Real h = (Real)(code - (int)c.h_zero);
        const Watched Wx_z = of_Wx[0](now.Wx[0]), Rh_z = of_Rh[0](now.Rh[0]);
        const Watched Wx_r = of_Wx[1](now.Wx[1]), Rh_r = of_Rh[1](now.Rh[1]);
        const Watched Wx_g = of_Wx[2](now.Wx[2]), Rh_g = of_Rh[2](now.Rh[2]);
        const Watched r_pre = watched(c.r_pre, Wx_r.v, Rh_r.v);
        const Watched z_pre = watched(c.z_pre, Wx_z.v, Rh_z.v);
        const Real r = r_of(r_pre.v), z = z_of(z_pre.v);
        Real rest = R::times(r, Rh_g.v);
        float in_rest = 1.f, in_old = 1.f, in_fresh = 1.f;
#if QG_RRH
        const Watched rRh = watched(c.rRh, rest);
        rest = plain(rRh.v);
        in_rest = rRh.inside;
#endif
        const Watched g_pre = watched(c.g_pre, Wx_g.v, rest);
        const Real g = g_of(g_pre.v);
        Real old = R::times(z, h), fresh = R::times(R::plus(c.one, -z), g);
#if QG_OLD
        const Watched old_contrib = watched(c.old_contrib, old);
        old = plain(old_contrib.v);
        in_old = old_contrib.inside;
#endif
#if QG_NEW
        const Watched new_contrib = watched(c.new_contrib, fresh);
        fresh = plain(new_contrib.v);
        in_fresh = new_contrib.inside;
#endif
        float in_h = watched(c.h, old, fresh).inside;
#if QG_ZONEOUT
        in_h *= rest_of_it;
#endif

        const float real_z = (float)z * p.s_z, real_r = (float)r * p.s_r;
        const float real_g = (float)g * p.s_g, real_h = (float)h * p.s_h;
        // one rounding: gates near 1 keep what they lack
        const float less_z = __fmaf_rn((float)-z, p.s_z, 1.f);
        const float less_r = __fmaf_rn((float)-r, p.s_r, 1.f);
        const float bend = fmaxf(__fmaf_rn(-real_g, real_g, 1.f), 0.f);
        in_old *= in_h;
        in_fresh *= in_h;
        const float to_z = (in_old * real_h - in_fresh * real_g) * real_z * less_z * z_pre.inside;
        const float to_g = in_fresh * less_z * bend * g_pre.inside, to_rest = to_g * in_rest;
        const float to_r = to_rest * (float)Rh_g.v * p.s_Rh * real_r * less_r * r_pre.inside;
        float direct = in_old * real_z;
#if QG_ZONEOUT
        direct += share;
#endif
        p.of_R[at] =
            slopes(direct, to_z * Rh_z.inside, to_r * Rh_r.inside, to_rest * real_r * Rh_g.inside);
        p.of_W[at] = slopes(to_z * Wx_z.inside, to_r * Wx_r.inside, to_g * Wx_g.inside, 0.f);
    }
}
