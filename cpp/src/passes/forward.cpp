#include <cstdlib>  // defines __GLIBC__

#include "passes/equations.hpp"
#include "passes/gemm.hpp"
#include "passes/on_device.hpp"
#include "passes/parts.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {
namespace {

// The operands of the gates of one row.
template <class T>
struct Row {
    const T *Wx, *Rh, *bx, *br, *h, *mask;
    T *out, *v;
    int64_t H;
    T share;  // of the old state that remains
};

template <class T, Zoneout zoneout, bool kept>
QG_BODY void gates_of_row(const Row<T> &row) {
    const int64_t H = row.H;
    const T *Wx = row.Wx, *Rh = row.Rh, *bx = row.bx, *br = row.br, *h = row.h, *mask = row.mask;
    T *const out = row.out, *const v = row.v;
    const T share = row.share;
    QG_INDEPENDENT
    for (int64_t j = 0; j < H; ++j) {
        const UnitGates<T> u = gates_of_unit(Wx, bx, br, H, j, Rh[j], Rh[H + j], Rh[2 * H + j]);
        if constexpr (kept) {
            v[j] = u.z;
            v[H + j] = u.r;
            v[2 * H + j] = u.g;
            v[3 * H + j] = u.q;
        }
        const T taken = zoneout == Zoneout::masked ? mask[j] : T(1);
        out[j] = next_state(u, h[j], zoneout, taken, share);
    }
}

template <class T>
QG_BODY void gates_of_kind(const Row<T> &row, Zoneout zoneout) {
    constexpr auto none = Zoneout::none, masked = Zoneout::masked, expected = Zoneout::expected;
    if (zoneout == masked)
        row.v ? gates_of_row<T, masked, true>(row) : gates_of_row<T, masked, false>(row);
    else if (zoneout == expected)
        row.v ? gates_of_row<T, expected, true>(row) : gates_of_row<T, expected, false>(row);
    else
        row.v ? gates_of_row<T, none, true>(row) : gates_of_row<T, none, false>(row);
}

QG_CLONES void gates(const Row<float> &row, Zoneout zoneout) { gates_of_kind(row, zoneout); }
QG_CLONES void gates(const Row<double> &row, Zoneout zoneout) { gates_of_kind(row, zoneout); }

}  // namespace

template <class T, class AccumT>
struct ForwardPass<T, AccumT>::State {
    State(const PassSizes &given, bool trains, cublasHandle_t blas, cudaStream_t stream)
        : sizes(given), training(trains), on_device(blas, stream) {}

    void run(const ForwardArguments<T> &c) {
        check_zoneout(c.zoneout_prob);
        if (!c.steps) return;
        if (const int device = device_of(c); device != kHost)
            return on_device.forward(device, sizes, zoneout_of(c), c);
        const auto [N, C, H] = sizes;
        W.resize(C, 3 * H);
        R.resize(H, 3 * H);
        const int64_t items = c.steps * N;
        in_parts(pass_parts(threads, sizes, c.steps), [&](int64_t part, int64_t parts,
                                                          auto barrier) {
            W.pack(c.W, part, parts);
            R.pack(c.R, part, parts);
            barrier();
            const Strided<T> x{c.x, sizes.C, 1};
            W.multiply(x, part_start(items, part, parts), part_start(items, part + 1, parts),
                       c.tmp_Wx, false);
            barrier();
            for (int64_t t = 0; t < c.steps; ++t)
                step(c, t, part_start(sizes.N, part, parts), part_start(sizes.N, part + 1, parts));
        });
    }

    Zoneout zoneout_of(const ForwardArguments<T> &c) const {
        if (training) return c.mask ? Zoneout::masked : Zoneout::none;
        return c.zoneout_prob > 0 ? Zoneout::expected : Zoneout::none;
    }

    // A step of some rows.
    void step(const ForwardArguments<T> &c, int64_t t, int64_t first, int64_t end) const {
        const int64_t N = sizes.N, H = sizes.H;
        const T *const h = t ? c.out + (t - 1) * N * H : c.h;
        const Zoneout zoneout = zoneout_of(c);
        R.multiply(Strided<T>{h, H, 1}, first, end, c.tmp_Rh, false);
        for (int64_t i = first; i < end; ++i) {
            const int64_t item = t * N + i;
            gates(Row<T>{c.tmp_Wx + item * 3 * H, c.tmp_Rh + i * 3 * H, c.bx, c.br, h + i * H,
                         c.mask ? c.mask + item * H : nullptr, c.out + item * H,
                         c.v ? c.v + item * 4 * H : nullptr, H, static_cast<T>(c.zoneout_prob)},
                  zoneout);
        }
    }

    PassSizes sizes;
    bool training;
    int threads = 0;
    PackedMatrix<T> W, R;
    OnDevice<T> on_device;
};

template <class T, class AccumT>
ForwardPass<T, AccumT>::ForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                                    const cublasHandle_t &blas_handle, const cudaStream_t &stream)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size), training, blas_handle,
                       stream)) {}

template <class T, class AccumT>
ForwardPass<T, AccumT>::~ForwardPass() = default;

template <class T, class AccumT>
void ForwardPass<T, AccumT>::set_threads(int threads) {
    state_->threads = checked_threads(threads);
}

template <class T, class AccumT>
void ForwardPass<T, AccumT>::Iterate(const T *W, const T *R, const T *bx, const T *br, const T *x,
                                     const T *h, T *h_out, T *v, T *tmp_Wx, T *tmp_Rh,
                                     float zoneout_prob, const T *zoneout_mask) {
    state_->run({1, W, R, bx, br, x, h, h_out, v, tmp_Wx, tmp_Rh, zoneout_prob, zoneout_mask});
}

template <class T, class AccumT>
void ForwardPass<T, AccumT>::Run(int steps, const T *W, const T *R, const T *bx, const T *br,
                                 const T *x, T *h, T *v, T *tmp_Wx, T *tmp_Rh, float zoneout_prob,
                                 const T *zoneout_mask) {
    check_steps(steps);
    T *const out = h + state_->sizes.N * state_->sizes.H;
    state_->run({steps, W, R, bx, br, x, h, out, v, tmp_Wx, tmp_Rh, zoneout_prob, zoneout_mask});
}

template class ForwardPass<float>;
template class ForwardPass<double>;

}  // namespace quant_gru
