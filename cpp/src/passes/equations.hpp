// The equations of one unit and step, and their derivatives, for the CPU and for CUDA. Rows have
// gates in the order update, reset, candidate.
#pragma once

#include <stdint.h>

#if defined(REAL)  // a kernel
#define QG_UNIT static inline
namespace quant_gru {
QG_UNIT float exp_of_negative(float x) { return expf(x); }
QG_UNIT double exp_of_negative(double x) { return exp(x); }
}  // namespace quant_gru
#else
#include "cpu/core/exponential.hpp"
#define QG_UNIT QG_BODY
#endif

namespace quant_gru {

template <class T>
QG_UNIT T sigmoid(T x) {
    const T e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : T(1)) / (1 + e);
}

template <class T>
QG_UNIT T hyperbolic_tangent(T x) {
    const T e = exp_of_negative(x < 0 ? 2 * x : -2 * x), y = (1 - e) / (1 + e);
    return x < 0 ? -y : y;
}

// How the state before a step enters the state after it.
enum class Zoneout { none, masked, expected };

template <class T>
struct UnitGates {
    T z, r, g, q;  // q is R_g h + br_g
};

// Unit j, from rows (3H) and the unit's products with R.
template <class T>
QG_UNIT UnitGates<T> gates_of_unit(const T *Wx, const T *bx, const T *br, int64_t H, int64_t j,
                                   T Rh_z, T Rh_r, T Rh_g) {
    UnitGates<T> u;
    u.z = sigmoid(Wx[j] + bx[j] + Rh_z + br[j]);
    u.r = sigmoid(Wx[H + j] + bx[H + j] + Rh_r + br[H + j]);
    u.q = Rh_g + br[2 * H + j];
    u.g = hyperbolic_tangent(Wx[2 * H + j] + bx[2 * H + j] + u.r * u.q);
    return u;
}

// mask: whether a unit takes its new value, 1 or 0. share: of the old value that remains.
template <class T>
QG_UNIT T next_state(const UnitGates<T> &u, T h, Zoneout zoneout, T mask, T share) {
    const T next = u.z * h + (1 - u.z) * u.g;
    if (zoneout == Zoneout::masked) return h + (next - h) * mask;
    if (zoneout == Zoneout::expected) return share * h + (1 - share) * next;
    return next;
}

template <class T>
struct UnitGradients {
    T dz, dr, dg, dq;  // of the sums before sigmoid and tanh, and of q
    T dh;              // of the state before the step, without the share that R passes on
};

// total: the gradient of the state after the step. taken: the mask, 1 without zoneout.
template <class T>
QG_UNIT UnitGradients<T> gradients_of_unit(const UnitGates<T> &u, T h, T taken, T total) {
    const T d = taken * total;
    UnitGradients<T> to;
    to.dg = (1 - u.z) * d * (1 - u.g * u.g);
    to.dr = to.dg * u.q * u.r * (1 - u.r);
    to.dz = (h - u.g) * d * u.z * (1 - u.z);
    to.dq = to.dg * u.r;
    to.dh = (1 - taken) * total + u.z * d;
    return to;
}

}  // namespace quant_gru
