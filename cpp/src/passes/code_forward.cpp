#include <vector>

#include "cpu/core/tasks.hpp"
#include "network.hpp"
#include "passes/code_layer.hpp"

namespace quant_gru {

template <class T>
struct CodeForwardPass<T>::State {
    State(const PassSizes &given, bool trains) : sizes(given), training(trains) {}

    // Runs all steps; the last arguments are as in `CodeArguments`.
    void run(int64_t steps, const CodeArguments<T> &arguments, const T *x, const T *before,
             T *after, const T *mask) {
        const int64_t N = sizes.N, C = sizes.C, H = sizes.H;
        check_zoneout(arguments.zoneout);
        CodeArguments<T> used = arguments;
        if (training) used.zoneout = 0;
        Task task{&layer.of(sizes, used), {}};
        if (!steps) return;
        Job &job = task.job;
        job.x = {x, false, N * C, C};
        job.h0 = {before, false, 0, H};
        job.out.codes = after;
        job.out.codes_step = N * H;
        job.out.codes_row = H;
        final.resize(static_cast<size_t>(N * H));
        job.last.codes = final.data();
        job.last.codes_row = H;
        if (mask && training) {
            held = held_units(mask, steps * N * H);
            job.held = held.data();
        }
        job.T = steps;
        job.N = N;
        run_tasks({task}, thread_count(threads), scratch);
    }

    PassSizes sizes;
    bool training;
    int threads = 0;
    CodeLayer<T> layer;
    std::vector<uint8_t> held;
    std::vector<T> final;
    Scratch scratch;
};

template <class T>
CodeForwardPass<T>::CodeForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                                    const cublasHandle_t &, const cudaStream_t &)
    : state_(new State(PassSizes(batch_size, input_size, hidden_size), training)) {}

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
    state_->run(steps, {W, R, false, bx, br, zoneout_prob, scale, zero_point}, x, h,
                h + state_->sizes.N * state_->sizes.H, zoneout_mask);
}

template <class T>
void CodeForwardPass<T>::Iterate(const T *W, const T *R, const int32_t *bx, const int32_t *br,
                                 const T *x, const T *h, T *h_out, T *, int32_t *, int32_t *,
                                 float zoneout_prob, const T *zoneout_mask, const float *scale,
                                 const float *zero_point) {
    state_->run(1, {W, R, false, bx, br, zoneout_prob, scale, zero_point}, x, h, h_out,
                zoneout_mask);
}

template class CodeForwardPass<int8_t>;
template class CodeForwardPass<int16_t>;

}  // namespace quant_gru
