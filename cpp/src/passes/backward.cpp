#include <cstdlib>  // defines __GLIBC__

#include "passes/clones.hpp"
#include "passes/gemm.hpp"
#include "passes/sizes.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {
namespace {

// Local derivatives of one row. The state before the step has a stride, because a step by
// `Iterate` receives it transposed.
template <class T>
struct Row {
    const T *h, *v, *dh_new, *mask;
    T *dh, *dp, *dq;
    int64_t H, stride;
};

template <class T>
QG_BODY void derivatives_of_row(const Row<T> &row) {
    const int64_t H = row.H, stride = row.stride;
    const T *h = row.h, *v = row.v, *dh_new = row.dh_new, *mask = row.mask;
    T *const dh = row.dh, *const dp = row.dp, *const dq = row.dq;
    for (int64_t j = 0; j < H; ++j) {
        const T z = v[j], r = v[H + j], g = v[2 * H + j], q = v[3 * H + j];
        const T total = dh_new[j] + dh[j], taken = mask ? mask[j] : T(1), d = taken * total;
        dh[j] = (1 - taken) * total + z * d;
        const T dg = (1 - z) * d * (1 - g * g);
        const T dr = dg * q * r * (1 - r), dz = (h[j * stride] - g) * d * z * (1 - z);
        dp[j] = dq[j] = dz;
        dp[H + j] = dq[H + j] = dr;
        dp[2 * H + j] = dg;
        dq[2 * H + j] = dg * r;
    }
}

QG_CLONES void derivatives(const Row<float> &row) { derivatives_of_row(row); }
QG_CLONES void derivatives(const Row<double> &row) { derivatives_of_row(row); }

// to (n) += the sum of all rows (count, n)
template <class T>
void add_rows(const T *rows, int64_t count, int64_t n, T *to) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < n; ++j) to[j] += rows[i * n + j];
}

}  // namespace

template <class T>
struct BackwardPass<T>::State {
    PassSizes sizes;
    PackedMatrix<T> R_t;

    // One step; the state of row i and unit j is h[i * row + j * unit].
    void step(const T *h, int64_t row, int64_t unit, const T *v, const T *dh_new, T *dh, T *dp,
              T *dq, const T *mask) const {
        const auto [N, C, H] = sizes;
        for (int64_t i = 0; i < N; ++i)
            derivatives(Row<T>{h + i * row, v + i * 4 * H, dh_new + i * H,
                               mask ? mask + i * H : nullptr, dh + i * H, dp + i * 3 * H,
                               dq + i * 3 * H, H, unit});
        R_t.multiply(Strided<T>{dq, 3 * H, 1}, N, dh, H, true);
    }

    // The gradients that do not depend on the order of steps; `rows` are steps times sequences.
    void finish(int64_t rows, const T *W_t, const Strided<T> &x_t, const Strided<T> &h_t, T *dx,
                T *dW, T *dR, T *dbx, T *dbr, const T *dp, const T *dq) const {
        const auto [N, C, H] = sizes;
        multiply(Strided<T>{dp, 3 * H, 1}, rows, W_t, 3 * H, C, dx, false);
        multiply(x_t, C, dp, rows, 3 * H, dW, true);
        multiply(h_t, H, dq, rows, 3 * H, dR, true);
        add_rows(dp, rows, 3 * H, dbx);
        add_rows(dq, rows, 3 * H, dbr);
    }
};

template <class T>
BackwardPass<T>::BackwardPass(int batch_size, int input_size, int hidden_size,
                              const cublasHandle_t &, const cudaStream_t &)
    : state_(new State{PassSizes(batch_size, input_size, hidden_size), {}}) {}

template <class T>
BackwardPass<T>::~BackwardPass() = default;

template <class T>
void BackwardPass<T>::Iterate(const T *W_t, const T *R_t, const T *, const T *, const T *x_t,
                              const T *h_t, const T *v, const T *dh_new, T *dx, T *dW, T *dR,
                              T *dbx, T *dbr, T *dh, T *dp, T *dq, const T *zoneout_mask) {
    const auto [N, C, H] = state_->sizes;
    state_->R_t.pack(R_t, 3 * H, H);
    state_->step(h_t, 1, N, v, dh_new, dh, dp, dq, zoneout_mask);
    state_->finish(N, W_t, Strided<T>{x_t, N, 1}, Strided<T>{h_t, N, 1}, dx, dW, dR, dbx, dbr, dp,
                   dq);
}

template <class T>
void BackwardPass<T>::Run(int steps, const T *W_t, const T *R_t, const T *, const T *, const T *x_t,
                          const T *h, const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx,
                          T *dbr, T *dh, T *dp, T *dq, const T *zoneout_mask) {
    check_steps(steps);
    const auto [N, C, H] = state_->sizes;
    state_->R_t.pack(R_t, 3 * H, H);
    for (int64_t t = steps - 1; t >= 0; --t)
        state_->step(h + t * N * H, H, 1, v + t * N * 4 * H, dh_new + (t + 1) * N * H, dh,
                     dp + t * N * 3 * H, dq + t * N * 3 * H,
                     zoneout_mask ? zoneout_mask + t * N * H : nullptr);
    const int64_t rows = steps * N;
    state_->finish(rows, W_t, Strided<T>{x_t, rows, 1}, Strided<T>{h, 1, H}, dx, dW, dR, dbx, dbr,
                   dp, dq);
}

template class BackwardPass<float>;
template class BackwardPass<double>;

}  // namespace quant_gru
