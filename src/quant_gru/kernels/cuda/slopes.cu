// The slopes of every element and step: gates are made again from both products, with the
// arithmetic of the forward, and so is whether a value was clamped, which stops its gradient.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, TZ, TR, TG: as for the recurrence
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
    const void *out, *h0;    // codes of the states after each step, before the first one
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

inline int64_t of_plane(const Projected &p, const int32_t *v, int64_t H, int64_t channel) {
    if (p.weight_planes == 1) return v[channel];
    return 256 * (int64_t)v[channel] + v[3 * H + channel] + 128 * (int64_t)v[6 * H];
}

// A channel of W x or R h, zero-point-free, the magic number taken off.
inline Watched projected(const Projected &p, const Channel &c, const Numbers &all, int64_t row,
                         int64_t channel) {
    const int32_t *const v = p.product + row * p.columns;
    int64_t total = of_plane(p, v, all.H, channel);
    if (p.planes == 2) total = 256 * total + of_plane(p, v + all.rows * p.columns, all.H, channel);
    total += c.folded;
    if (sizeof(Real) == 4 && c.exact) {
        const float lo = (float)p.lo + Magic<float>::number();
        const float hi = (float)p.hi + Magic<float>::number();
        const float sum = round_term((float)(int)total, c.m_float);
        const float limited = Magic<float>::limit(sum, lo, hi);
        return {(Real)plain(limited), sum == limited ? 1.f : 0.f};
    }
    const double lo = p.lo + Magic<double>::number(), hi = p.hi + Magic<double>::number();
    const double sum = round_term((double)total, c.m), limited = Magic<double>::limit(sum, lo, hi);
    return {(Real)plain(limited), sum == limited ? 1.f : 0.f};
}

// A block: some rows of 32 units.
extern "C" __global__ void __launch_bounds__(256) slopes_of(const __grid_constant__ Pair pair) {
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
    Channel of_Wx[3], of_Rh[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        of_Wx[gate] = p.W.channels[gate * H + unit];
        of_Rh[gate] = p.R.channels[gate * H + unit];
    }
    for (int64_t local = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; local < p.rows;
         local += (int64_t)gridDim.x * 8) {
        const int64_t row = p.first + local, at = row * H + unit;
        const bool over = p.lengths && row / N >= p.lengths[row % N];
        if (over || (p.held && p.held[at])) {
            p.of_R[at] = slopes(1.f, 0.f, 0.f, 0.f);
            p.of_W[at] = slopes(0.f, 0.f, 0.f, 0.f);
            continue;
        }
        int64_t from = p.reverse ? row + N : row - N;
        const void *states = p.out;
        if (from < 0 || from >= p.T * N) {
            states = p.h0;
            from = p.reverse ? from - p.T * N : from + N;
        }
        const Real h = (Real)(int)(read_code(states, p.h_kind, from * H + unit) - c.h_zero);

        const Watched Wx_z = projected(p.W, of_Wx[0], p, local, unit),
                      Rh_z = projected(p.R, of_Rh[0], p, local, unit);
        const Watched Wx_r = projected(p.W, of_Wx[1], p, local, H + unit);
        const Watched Rh_r = projected(p.R, of_Rh[1], p, local, H + unit);
        const Watched Wx_g = projected(p.W, of_Wx[2], p, local, 2 * H + unit);
        const Watched Rh_g = projected(p.R, of_Rh[2], p, local, 2 * H + unit);
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
        const float in_h = watched(c.h, old, fresh).inside;

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
        p.of_R[at] = slopes(in_old * real_z, to_z * Rh_z.inside, to_r * Rh_r.inside,
                            to_rest * real_r * Rh_g.inside);
        p.of_W[at] = slopes(to_z * Wx_z.inside, to_r * Wx_r.inside, to_g * Wx_g.inside, 0.f);
    }
}
