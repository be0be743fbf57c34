#include <vector>

#include "cpu/core/tasks.hpp"
#include "network.hpp"
#include "passes/code_layer.hpp"
#include "passes/code_on_device.hpp"

namespace quant_gru {

template <class T>
struct CodeForwardPass<T>::State {
    State(const PassSizes &given, bool trains, cudaStream_t stream)
        : sizes(given), training(trains), on_device(nullptr, stream) {}

    void run(CodeForward<T> c) {
        const int64_t N = sizes.N, C = sizes.C, H = sizes.H;
        check_zoneout(c.arguments.zoneout);
        if (training)
            c.arguments.zoneout = 0;
        else
            c.mask = nullptr;
        const int device = c.steps ? device_of(c) : kHost;
        if (device != kHost) return on_device.forward(device, sizes, c);
        Task task{&layer.of(sizes, c.arguments), {}};
        if (!c.steps) return;
        Job &job = task.job;
        job.x = {c.x, false, N * C, C};
        job.h0 = {c.before, false, 0, H};
        job.out.codes = c.after;
        job.out.codes_step = N * H;
        job.out.codes_row = H;
        final.resize(static_cast<size_t>(N * H));
        job.last.codes = final.data();
        job.last.codes_row = H;
        if (c.mask) {
            held = held_units(c.mask, c.steps * N * H);
            job.held = held.data();
        }
        job.T = c.steps;
        job.N = N;
        run_tasks({task}, thread_count(threads), scratch);
    }

    PassSizes sizes;
    bool training;
    int threads = 0;
    CodeLayer<T> layer;
    CodeOnDevice<T> on_device;
    std::vector<uint8_t> held;
    std::vector<T> final;
    Scratch scratch;
};

template <class T>
CodeForwardPass<T>::CodeForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                                    const cublasHandle_t &, const cudaStream_t &stream)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size), training, stream)) {}

template <class T>
CodeForwardPass<T>::~CodeForwardPass() = default;

template <class T>
void CodeForwardPass<T>::set_threads(int threads) {
    state_->threads = checked_threads(threads);
}

template <class T>
void CodeForwardPass<T>::Run(int steps, const T *W, const T *R, const int32_t *bx,
                             const int32_t *br, const T *x, T *h, T *, int32_t *, int32_t *,
                             float zoneout_prob, const T *zoneout_mask, const float *scale,
                             const float *zero_point) {
    check_steps(steps);
    state_->run({steps,
                 false,
                 {W, R, false, bx, br, zoneout_prob, scale, zero_point},
                 x,
                 h,
                 h + state_->sizes.N * state_->sizes.H,
                 zoneout_mask});
}

template <class T>
void CodeForwardPass<T>::Iterate(const T *W, const T *R, const int32_t *bx, const int32_t *br,
                                 const T *x, const T *h, T *h_out, T *, int32_t *, int32_t *,
                                 float zoneout_prob, const T *zoneout_mask, const float *scale,
                                 const float *zero_point) {
    state_->run({1,
                 true,
                 {W, R, false, bx, br, zoneout_prob, scale, zero_point},
                 x,
                 h,
                 h_out,
                 zoneout_mask});
}

template class CodeForwardPass<int8_t>;
template class CodeForwardPass<int16_t>;

}  // namespace quant_gru
