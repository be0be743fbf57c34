#include <cstdlib>  // defines __GLIBC__
#include <utility>

#include "cpu/core/clones.hpp"
#include "passes/equations.hpp"
#include "passes/gemm.hpp"
#include "passes/on_device.hpp"
#include "passes/parts.hpp"
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
    QG_INDEPENDENT
    for (int64_t j = 0; j < H; ++j) {
        const UnitGates<T> u{v[j], v[H + j], v[2 * H + j], v[3 * H + j]};
        const UnitGradients<T> d =
            gradients_of_unit(u, h[j * stride], mask ? mask[j] : T(1), dh_new[j] + dh[j]);
        dh[j] = d.dh;
        dp[j] = dq[j] = d.dz;
        dp[H + j] = dq[H + j] = d.dr;
        dp[2 * H + j] = d.dg;
        dq[2 * H + j] = d.dq;
    }
}

QG_CLONES void derivatives(const Row<float> &row) { derivatives_of_row(row); }
QG_CLONES void derivatives(const Row<double> &row) { derivatives_of_row(row); }

// Sums of columns first .. end of rows (count, n), added to `to` (n).
template <class T>
void add_rows(const T *rows, int64_t count, int64_t n, int64_t first, int64_t end, T *to) {
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = first; j < end; ++j) to[j] += rows[i * n + j];
}

}  // namespace

template <class T>
struct BackwardPass<T>::State {
    State(const PassSizes &given, cublasHandle_t blas, cudaStream_t stream)
        : sizes(given), on_device(blas, stream) {}

    void run(const BackwardArguments<T> &c) {
        if (!c.steps) return;
        if (const int device = device_of(c); device != kHost)
            return on_device.backward(device, sizes, c);
        const auto [N, C, H] = sizes;
        const int64_t items = c.steps * N, channels = 3 * H;
        W_t.resize(channels, C);
        R_t.resize(channels, H);
        dp.resize(items, channels);
        dq.resize(items, channels);
        // the recurrence, and 3 products of the same size
        const int64_t most = pass_parts(threads, sizes, 2 * c.steps);
        in_parts(most, [&](int64_t part, int64_t parts, auto barrier) {
            const auto start = [=](int64_t n, int64_t more = 0) {
                return part_start(n, part + more, parts);
            };
            W_t.pack(c.W_t, part, parts);
            R_t.pack(c.R_t, part, parts);
            barrier();
            for (int64_t t = c.steps - 1; t >= 0; --t)
                step(c, t, start(sizes.N), start(sizes.N, 1));
            barrier();
            dp.pack(c.dp, part, parts);
            dq.pack(c.dq, part, parts);
            const Strided<T> gradients{c.dp, channels, 1};
            W_t.multiply(gradients, start(items), start(items, 1), c.dx, false);
            for (const auto &[from, to] : {std::pair(c.dp, c.dbx), std::pair(c.dq, c.dbr)})
                add_rows(from, items, channels, start(channels), start(channels, 1), to);
            barrier();
            dp.multiply({c.x_t, items, 1}, start(sizes.C), start(sizes.C, 1), c.dW, true);
            dq.multiply(c.h_t, start(sizes.H), start(sizes.H, 1), c.dR, true);
        });
    }

    // A step of some rows.
    void step(const BackwardArguments<T> &c, int64_t t, int64_t first, int64_t end) const {
        const int64_t N = sizes.N, H = sizes.H;
        T *const dq = c.dq + t * N * 3 * H;
        for (int64_t i = first; i < end; ++i) {
            const int64_t item = t * N + i;
            derivatives(Row<T>{c.h + t * N * H + i * c.row, c.v + item * 4 * H, c.dh_new + item * H,
                               c.mask ? c.mask + item * H : nullptr, c.dh + i * H,
                               c.dp + item * 3 * H, dq + i * 3 * H, H, c.unit});
        }
        R_t.multiply(Strided<T>{dq, 3 * H, 1}, first, end, c.dh, true);
    }

    PassSizes sizes;
    int threads = 0;
    PackedMatrix<T> W_t, R_t, dp, dq;
    OnDevice<T> on_device;
};

template <class T>
BackwardPass<T>::BackwardPass(int batch_size, int input_size, int hidden_size,
                              const cublasHandle_t &blas_handle, const cudaStream_t &stream)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size), blas_handle, stream)) {}

template <class T>
BackwardPass<T>::~BackwardPass() = default;

template <class T>
void BackwardPass<T>::set_threads(int threads) {
    state_->threads = checked_threads(threads);
}

template <class T>
void BackwardPass<T>::Iterate(const T *W_t, const T *R_t, const T *, const T *, const T *x_t,
                              const T *h_t, const T *v, const T *dh_new, T *dx, T *dW, T *dR,
                              T *dbx, T *dbr, T *dh, T *dp, T *dq, const T *zoneout_mask) {
    const int64_t N = state_->sizes.N;
    state_->run({1,
                 W_t,
                 R_t,
                 x_t,
                 h_t,
                 1,
                 N,
                 {h_t, N, 1},
                 v,
                 dh_new,
                 dx,
                 dW,
                 dR,
                 dbx,
                 dbr,
                 dh,
                 dp,
                 dq,
                 zoneout_mask});
}

template <class T>
void BackwardPass<T>::Run(int steps, const T *W_t, const T *R_t, const T *, const T *, const T *x_t,
                          const T *h, const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx,
                          T *dbr, T *dh, T *dp, T *dq, const T *zoneout_mask) {
    check_steps(steps);
    const int64_t N = state_->sizes.N, H = state_->sizes.H;
    state_->run({steps,
                 W_t,
                 R_t,
                 x_t,
                 h,
                 H,
                 1,
                 {h, 1, H},
                 v,
                 dh_new + N * H,
                 dx,
                 dW,
                 dR,
                 dbx,
                 dbr,
                 dh,
                 dp,
                 dq,
                 zoneout_mask});
}

template class BackwardPass<float>;
template class BackwardPass<double>;

}  // namespace quant_gru
