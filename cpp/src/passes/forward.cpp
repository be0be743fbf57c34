#include <cstdlib>  // defines __GLIBC__

#include "passes/functions.hpp"
#include "passes/gemm.hpp"
#include "passes/sizes.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {
namespace {

// How the state before a step enters the state after it.
enum class Zoneout { none, masked, expected };

// The operands of the gates of one row.
template <class T>
struct Row {
    const T *Wx, *Rh, *bx, *br, *h, *mask;
    T *out, *v;
    int64_t H;
    T kept;
    Zoneout zoneout;
};

template <class T>
QG_BODY void gates_of_row(const Row<T> &row) {
    const int64_t H = row.H;
    const T *Wx = row.Wx, *Rh = row.Rh, *bx = row.bx, *br = row.br, *h = row.h;
    T *const out = row.out, *const v = row.v;
    for (int64_t j = 0; j < H; ++j) {
        const T z = sigmoid(Wx[j] + bx[j] + Rh[j] + br[j]);
        const T r = sigmoid(Wx[H + j] + bx[H + j] + Rh[H + j] + br[H + j]);
        const T q = Rh[2 * H + j] + br[2 * H + j];
        const T g = hyperbolic_tangent(Wx[2 * H + j] + bx[2 * H + j] + r * q);
        if (v) {
            v[j] = z;
            v[H + j] = r;
            v[2 * H + j] = g;
            v[3 * H + j] = q;
        }
        T next = z * h[j] + (1 - z) * g;
        if (row.zoneout == Zoneout::masked) next = h[j] + (next - h[j]) * row.mask[j];
        if (row.zoneout == Zoneout::expected) next = row.kept * h[j] + (1 - row.kept) * next;
        out[j] = next;
    }
}

QG_CLONES void gates(const Row<float> &row) { gates_of_row(row); }
QG_CLONES void gates(const Row<double> &row) { gates_of_row(row); }

}  // namespace

template <class T, class AccumT>
struct ForwardPass<T, AccumT>::State {
    PassSizes sizes;
    bool training;
    PackedMatrix<T> R;

    // Gates of all rows of a step; tmp_Wx and tmp_Rh hold W x and R h.
    void step(const T *bx, const T *br, const T *h, T *out, T *v, const T *Wx, const T *Rh,
              float probability, const T *mask) const {
        const auto [N, C, H] = sizes;
        const Zoneout zoneout = mask && training  ? Zoneout::masked
                                : probability > 0 ? training ? Zoneout::none : Zoneout::expected
                                                  : Zoneout::none;
        for (int64_t i = 0; i < N; ++i)
            gates(Row<T>{Wx + i * 3 * H, Rh + i * 3 * H, bx, br, h + i * H,
                         mask ? mask + i * H : nullptr, out + i * H, v ? v + i * 4 * H : nullptr, H,
                         static_cast<T>(probability), zoneout});
    }
};

template <class T, class AccumT>
ForwardPass<T, AccumT>::ForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                                    const cublasHandle_t &, const cudaStream_t &)
    : state_(new State{PassSizes(batch_size, input_size, hidden_size), training, {}}) {}

template <class T, class AccumT>
ForwardPass<T, AccumT>::~ForwardPass() = default;

template <class T, class AccumT>
void ForwardPass<T, AccumT>::Iterate(const T *W, const T *R, const T *bx, const T *br, const T *x,
                                     const T *h, T *h_out, T *v, T *tmp_Wx, T *tmp_Rh,
                                     float zoneout_prob, const T *zoneout_mask) {
    check_zoneout(zoneout_prob);
    const auto [N, C, H] = state_->sizes;
    multiply(Strided<T>{x, C, 1}, N, W, C, 3 * H, tmp_Wx, false);
    multiply(Strided<T>{h, H, 1}, N, R, H, 3 * H, tmp_Rh, false);
    state_->step(bx, br, h, h_out, v, tmp_Wx, tmp_Rh, zoneout_prob, zoneout_mask);
}

template <class T, class AccumT>
void ForwardPass<T, AccumT>::Run(int steps, const T *W, const T *R, const T *bx, const T *br,
                                 const T *x, T *h, T *v, T *tmp_Wx, T *tmp_Rh, float zoneout_prob,
                                 const T *zoneout_mask) {
    check_steps(steps);
    check_zoneout(zoneout_prob);
    const auto [N, C, H] = state_->sizes;
    multiply(Strided<T>{x, C, 1}, steps * N, W, C, 3 * H, tmp_Wx, false);
    state_->R.pack(R, H, 3 * H);
    for (int64_t t = 0; t < steps; ++t) {
        T *const before = h + t * N * H;
        state_->R.multiply(Strided<T>{before, H, 1}, N, tmp_Rh, 3 * H, false);
        state_->step(bx, br, before, before + N * H, v ? v + t * N * 4 * H : nullptr,
                     tmp_Wx + t * N * 3 * H, tmp_Rh, zoneout_prob,
                     zoneout_mask ? zoneout_mask + t * N * H : nullptr);
    }
}

template class ForwardPass<float>;
template class ForwardPass<double>;

}  // namespace quant_gru
