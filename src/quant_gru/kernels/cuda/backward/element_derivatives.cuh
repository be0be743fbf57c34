// The derivatives of one element from the sums of both GEMMs. The arithmetic is that of the
// forward, with a mask for every clamp, because a clamp stops the gradient.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, QG_ZONEOUT: see recurrence/persistent.cu
#ifndef QUANT_GRU_ELEMENT_CUH
#define QUANT_GRU_ELEMENT_CUH

#include "backward/backward.cuh"

typedef REAL Real;

// The gate arithmetic, and the scales of codes.
struct Gates {
    float s_z, s_r, s_g, s_h, s_Rh;
    Cell<Real> cell;
};

// A result, with or without the magic number, and a mask: 1 if it was not clamped, otherwise 0.
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
        const int64_t sum = qg_round_by(total, (int)s.k, QG_RULE, 0);
        const int64_t limited = qg_clamp(sum, s.low, s.high);
        return {Magic<Real>::plus((Real)limited, Magic<Real>::number()),
                sum == limited ? 1.f : 0.f};
    }
#endif
    const Real total = Magic<Real>::fma(v1, s.m[0], Magic<Real>::times(v2, s.m[1]));
    const Real sum = round_sum(total), limited = clamped(s, sum);
    return {limited, sum == limited ? 1.f : 0.f};
}

// Round a sum of a GEMM to a zero-point-free code. `lo` and `hi` include the magic number.
template <class Float>
inline Watched rounded(Float sum, Float m, Float lo, Float hi) {
    const Float v = round_term(sum, m), limited = Magic<Float>::limit(v, lo, hi);
    return {(Real)plain(limited), v == limited ? 1.f : 0.f};
}

struct ElementDerivatives {
    Derivatives of_R, of_W;  // for the previous state and R h; for W x
};

// Return the derivatives of a unit that keeps its state.
inline ElementDerivatives derivatives_of_staying() {
    return {derivatives(1.f, 0.f, 0.f, 0.f), derivatives(0.f, 0.f, 0.f, 0.f)};
}

// Return the derivatives from zero-point-free codes of W x and R h (update, reset, candidate) and
// of the previous state. `masked`: a mask selects the units that keep their state; otherwise
// zoneout mixes a share of the previous state into every unit.
template <class Z, class Reset, class G>
inline ElementDerivatives derivatives_of_element(const Gates &p, const Z &z_of, const Reset &r_of,
                                                 const G &g_of, const Watched (&Wx)[3],
                                                 const Watched (&Rh)[3], Real h, bool masked) {
    typedef Magic<Real> R;
    const Cell<Real> &c = p.cell;
    const Watched r_pre = watched(c.r_pre, Wx[1].v, Rh[1].v);
    const Watched z_pre = watched(c.z_pre, Wx[0].v, Rh[0].v);
    const Real r = r_of(r_pre.v), z = z_of(z_pre.v);
    Real rest = R::times(r, Rh[2].v);
    float in_rest = 1.f, in_old = 1.f, in_fresh = 1.f;
#if QG_RRH
    const Watched rRh = watched(c.rRh, rest);
    rest = plain(rRh.v);
    in_rest = rRh.inside;
#endif
    const Watched g_pre = watched(c.g_pre, Wx[2].v, rest);
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
    // split dL/dh' into a share that goes directly to the previous state, and the rest
    const float share = masked ? 0.f : (float)c.zoneout.m[0];
    in_h *= masked ? 1.f : (float)c.zoneout.m[1];
#endif

    const float real_z = (float)z * p.s_z, real_r = (float)r * p.s_r;
    const float real_g = (float)g * p.s_g, real_h = (float)h * p.s_h;
    // with a single rounding, 1 - gate stays accurate for gates near 1
    const float less_z = __fmaf_rn((float)-z, p.s_z, 1.f);
    const float less_r = __fmaf_rn((float)-r, p.s_r, 1.f);
    const float bend = fmaxf(__fmaf_rn(-real_g, real_g, 1.f), 0.f);
    in_old *= in_h;
    in_fresh *= in_h;
    const float to_z = (in_old * real_h - in_fresh * real_g) * real_z * less_z * z_pre.inside;
    const float to_g = in_fresh * less_z * bend * g_pre.inside, to_rest = to_g * in_rest;
    const float to_r = to_rest * (float)Rh[2].v * p.s_Rh * real_r * less_r * r_pre.inside;
    float direct = in_old * real_z;
#if QG_ZONEOUT
    direct += share;
#endif
    return {derivatives(direct, to_z * Rh[0].inside, to_r * Rh[1].inside,
                        to_rest * real_r * Rh[2].inside),
            derivatives(to_z * Wx[0].inside, to_r * Wx[1].inside, to_g * Wx[2].inside, 0.f)};
}

#endif
