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
    explicit State(const PassSizes &given) : sizes(given) {}

    // x (T, N, C); states before the first step and after each step; dh_new (T, N, H).
    void run(int64_t steps, const CodeArguments<T> &arguments, const T *x, const T *before,
             const T *after, const float *dh_new, float *dx, float *dW, float *dR, float *dbx,
             float *dbr, float *dh, const T *mask) {
        const auto [N, C, H] = sizes;
        const Layer &used = layer.of(sizes, arguments);
        if (!steps) return;
        BackwardCall call;
        call.x = x;
        call.h0 = before;
        call.out = after;
        std::vector<uint8_t> held;
        if (mask) {
            held = held_units(mask, steps * N * H);
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
        call.grad_last = call.dh0 = dh;
        Floats rows_W = floats(3 * H * C), rows_R = floats(3 * H * H);
        Floats rows_bx = floats(3 * H), rows_br = floats(3 * H);
        call.dx = dx;
        call.dW = rows_W.data();
        call.dR = rows_R.data();
        call.dbw = rows_bx.data();
        call.dbr = rows_br.data();
        call.chunk_items = kChunkItems;
        call.threads = thread_count(threads);
        run_backward(used, call);
        add_columns(rows_W, C, H, dW);
        add_columns(rows_R, H, H, dR);
        add_columns(rows_bx, 1, H, dbx);
        add_columns(rows_br, 1, H, dbr);
    }

    PassSizes sizes;
    int threads = 0;
    CodeLayer<T> layer;
};

template <class T>
CodeBackwardPass<T>::CodeBackwardPass(int batch_size, int input_size, int hidden_size,
                                      const cublasHandle_t &, const cudaStream_t &)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size))) {}

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
    expect_host(h);
    const auto [N, C, H] = state_->sizes;
    const std::vector<T> x = transposed(x_t, C, steps * N);
    state_->run(steps, {W_t, R_t, true, bx, br, 0, scale, zero_point}, x.data(), h, h + N * H,
                dh_new + N * H, dx, dW, dR, dbx, dbr, dh, zoneout_mask);
}

template <class T>
void CodeBackwardPass<T>::Iterate(const T *W_t, const T *R_t, const int32_t *bx, const int32_t *br,
                                  const T *x_t, const T *h_t, const T *, const float *dh_new,
                                  float *dx, float *dW, float *dR, float *dbx, float *dbr,
                                  float *dh, float *, float *, const T *zoneout_mask,
                                  const float *scale, const float *zero_point) {
    expect_host(h_t);
    const auto [N, C, H] = state_->sizes;
    const std::vector<T> x = transposed(x_t, C, N), h = transposed(h_t, H, N);
    // the state after the only step is not read
    state_->run(1, {W_t, R_t, true, bx, br, 0, scale, zero_point}, x.data(), h.data(), h.data(),
                dh_new, dx, dW, dR, dbx, dbr, dh, zoneout_mask);
}

template class CodeBackwardPass<int8_t>;
template class CodeBackwardPass<int16_t>;

}  // namespace quant_gru
