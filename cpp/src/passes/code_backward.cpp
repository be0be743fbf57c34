#include <utility>
#include <vector>

#include "cpu/training/backward.hpp"
#include "network.hpp"
#include "passes/code_layer.hpp"
#include "passes/code_on_device.hpp"

namespace quant_gru {
namespace {

// Rows times steps that are taken at once; any number gives the same bits.
constexpr int64_t kChunkItems = 512;

using Floats = std::vector<float>;

Floats floats(int64_t count) { return Floats(static_cast<size_t>(count)); }

// (n, m) from (m, n).
template <class T>
std::vector<T> transposed(const T *from, int64_t m, int64_t n) {
    std::vector<T> to(static_cast<size_t>(m * n));
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) to[static_cast<size_t>(j * m + i)] = from[i * n + j];
    return to;
}

// to (K, 3H), columns update, reset, candidate += rows (3H, K), reset, update, candidate.
void add_columns(const Floats &rows, int64_t K, int64_t H, float *to) {
    for (int64_t c = 0; c < 3 * H; ++c) {
        const int64_t row = c < H ? c + H : c < 2 * H ? c - H : c;
        for (int64_t i = 0; i < K; ++i) to[i * 3 * H + c] += rows[static_cast<size_t>(row * K + i)];
    }
}

}  // namespace

template <class T>
struct CodeBackwardPass<T>::State {
    State(const PassSizes &given, cublasHandle_t blas, cudaStream_t stream)
        : sizes(given), on_device(blas, stream) {}

    void run(const CodeBackward<T> &c) {
        const auto [N, C, H] = sizes;
        const int device = c.steps ? device_of(c) : kHost;
        if (device != kHost) return on_device.backward(device, sizes, c);
        if (!c.is_step) return run(c, c.h, c.h + N * H, c.dh_new + N * H);
        const std::vector<T> h = transposed(c.h, H, N);
        run(c, h.data(), h.data(), c.dh_new);  // the state after the only step is not read
    }

    // States before the first step and after each step; dh_new (T, N, H).
    void run(const CodeBackward<T> &c, const T *before, const T *after, const float *dh_new) {
        const auto [N, C, H] = sizes;
        const int64_t steps = c.steps;
        const CodeArguments<T> &arguments = c.arguments;
        const Layer &used = layer.of(sizes, arguments);
        if (!steps) return;
        const std::vector<T> x = transposed(c.x_t, C, steps * N);
        BackwardCall call;
        call.x = x.data();
        call.h0 = before;
        call.out = after;
        std::vector<uint8_t> held;
        if (c.mask) {
            held = held_units(c.mask, steps * N * H);
            call.held = held.data();
        }
        call.T = steps;
        call.N = N;
        call.W = arguments.W;
        call.R = arguments.R;
        call.W_bytes = call.R_bytes = sizeof(T);
        call.W_scales = arguments.column_scales(0, H);
        call.R_scales = arguments.column_scales(1, H);
        using Op = CodeOperator;
        call.scales = {arguments.scale_of(Op::x),     arguments.scale_of(Op::h),
                       arguments.scale_of(Op::Rh),    arguments.scale_of(Op::z_out),
                       arguments.scale_of(Op::r_out), arguments.scale_of(Op::g_out)};
        call.grad_out = dh_new;
        call.grad_step = N * H;
        call.grad_row = H;
        call.grad_last = call.dh0 = c.dh;
        Floats rows_W = floats(3 * H * C), rows_R = floats(3 * H * H);
        Floats rows_bx = floats(3 * H), rows_br = floats(3 * H);
        call.dx = c.dx;
        call.dW = rows_W.data();
        call.dR = rows_R.data();
        call.dbw = rows_bx.data();
        call.dbr = rows_br.data();
        call.chunk_items = kChunkItems;
        call.threads = thread_count(threads);
        run_backward(used, call);
        add_columns(rows_W, C, H, c.dW);
        add_columns(rows_R, H, H, c.dR);
        add_columns(rows_bx, 1, H, c.dbx);
        add_columns(rows_br, 1, H, c.dbr);
    }

    PassSizes sizes;
    int threads = 0;
    CodeLayer<T> layer;
    CodeOnDevice<T> on_device;
};

template <class T>
CodeBackwardPass<T>::CodeBackwardPass(int batch_size, int input_size, int hidden_size,
                                      const cublasHandle_t &blas_handle, const cudaStream_t &stream)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size), blas_handle, stream)) {}

template <class T>
CodeBackwardPass<T>::~CodeBackwardPass() = default;

template <class T>
void CodeBackwardPass<T>::set_threads(int threads) {
    state_->threads = checked_threads(threads);
}

template <class T>
void CodeBackwardPass<T>::Run(int steps, const T *W_t, const T *R_t, const int32_t *bx,
                              const int32_t *br, const T *x_t, const T *h, const T *,
                              const float *dh_new, float *dx, float *dW, float *dR, float *dbx,
                              float *dbr, float *dh, float *, float *, const T *zoneout_mask,
                              const float *scale, const float *zero_point) {
    check_steps(steps);
    state_->run({steps,
                 false,
                 {W_t, R_t, true, bx, br, 0, scale, zero_point},
                 x_t,
                 h,
                 dh_new,
                 dx,
                 dW,
                 dR,
                 dbx,
                 dbr,
                 dh,
                 zoneout_mask});
}

template <class T>
void CodeBackwardPass<T>::Iterate(const T *W_t, const T *R_t, const int32_t *bx, const int32_t *br,
                                  const T *x_t, const T *h_t, const T *, const float *dh_new,
                                  float *dx, float *dW, float *dR, float *dbx, float *dbr,
                                  float *dh, float *, float *, const T *zoneout_mask,
                                  const float *scale, const float *zero_point) {
    state_->run({1,
                 true,
                 {W_t, R_t, true, bx, br, 0, scale, zero_point},
                 x_t,
                 h_t,
                 dh_new,
                 dx,
                 dW,
                 dR,
                 dbx,
                 dbr,
                 dh,
                 zoneout_mask});
}

template class CodeBackwardPass<int8_t>;
template class CodeBackwardPass<int16_t>;

}  // namespace quant_gru
