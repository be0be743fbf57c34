// The arguments of float passes of several steps.
#pragma once

#include <cstdint>

#include "passes/gemm.hpp"

namespace quant_gru {

template <class T>
struct ForwardArguments {
    int64_t steps;
    const T *W, *R, *bx, *br, *x;
    const T *h;                    // the state before the first step (N, H)
    T *out, *v, *tmp_Wx, *tmp_Rh;  // out: the states after each step (T, N, H)
    float zoneout_prob;
    const T *mask;
};

template <class T>
struct BackwardArguments {
    int64_t steps;
    const T *W_t, *R_t, *x_t;
    const T *h;  // of step t, row i and unit j: h[t * N * H + i * row + j * unit]
    int64_t row, unit;
    Strided<T> h_t;       // the same states as (H, T * N)
    const T *v, *dh_new;  // dh_new: of the states after each step (T, N, H)
    T *dx, *dW, *dR, *dbx, *dbr, *dh, *dp, *dq;
    const T *mask;
};

}  // namespace quant_gru
