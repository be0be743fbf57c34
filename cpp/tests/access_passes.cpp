// The passes over pointers for tests from Python. With by_steps, `Iterate` runs each step; then x_t
// of a backward pass is (T, C, N), and h is (T, H, N).
#include <cstring>
#include <map>
#include <memory>
#include <tuple>

#include "access.hpp"
#include "cpu/core/threads.hpp"
#include "quant_gru/gru_interface.hpp"

using namespace quant_gru;

// Handles of cuBLAS and of a stream for the passes that follow; null for none.
static cublasHandle_t blas = nullptr;
static cudaStream_t stream = nullptr;
extern "C" void set_handles(void *blas_handle, void *of_stream) {
    blas = static_cast<cublasHandle_t>(blas_handle);
    stream = static_cast<cudaStream_t>(of_stream);
}

// The pass of these arguments, created at the first call. It is never destroyed, because libraries
// of CUDA may be gone when the process ends.
template <class Pass, class... Arguments>
static Pass &pass_of(Arguments... arguments) {
    static auto &all = *new std::map<std::tuple<Arguments...>, std::unique_ptr<Pass>>;
    auto &found = all[{arguments...}];
    if (!found) found = std::make_unique<Pass>(arguments...);
    return *found;
}

// Divides work among threads however little it is.
extern "C" void set_thread_price(double price) { thread_price = price; }

#define PASSES(T, name)                                                                           \
    extern "C" int64_t forward_##name(int threads, int training, int steps, int N, int C, int H,  \
                                      const T *W, const T *R, const T *bx, const T *br,           \
                                      const T *x, T *h, T *v, T *Wx, T *Rh, float p,              \
                                      const T *mask, int by_steps) {                              \
        return answer([&] {                                                                       \
            auto &pass = pass_of<ForwardPass<T>>(training != 0, N, C, H, blas, stream);           \
            pass.set_threads(threads);                                                            \
            const int64_t n = N;                                                                  \
            if (!by_steps) pass.Run(steps, W, R, bx, br, x, h, v, Wx, Rh, p, mask);               \
            for (int64_t t = 0; by_steps && t < steps; ++t)                                       \
                pass.Iterate(W, R, bx, br, x + t * n * C, h + t * n * H, h + (t + 1) * n * H,     \
                             v ? v + t * n * 4 * H : nullptr, Wx + t * n * 3 * H, Rh, p,          \
                             mask ? mask + t * n * H : nullptr);                                  \
            return std::string();                                                                 \
        });                                                                                       \
    }                                                                                             \
    extern "C" int64_t backward_##name(int threads, int steps, int N, int C, int H, const T *W_t, \
                                       const T *R_t, const T *x_t, const T *h, const T *v,        \
                                       const T *dh_new, T *dx, T *dW, T *dR, T *dbx, T *dbr,      \
                                       T *dh, T *dp, T *dq, const T *mask, int by_steps) {        \
        return answer([&] {                                                                       \
            auto &pass = pass_of<BackwardPass<T>>(N, C, H, blas, stream);                         \
            pass.set_threads(threads);                                                            \
            const int64_t n = N;                                                                  \
            if (!by_steps)                                                                        \
                pass.Run(steps, W_t, R_t, nullptr, nullptr, x_t, h, v, dh_new, dx, dW, dR, dbx,   \
                         dbr, dh, dp, dq, mask);                                                  \
            for (int64_t t = steps - 1; by_steps && t >= 0; --t)                                  \
                pass.Iterate(W_t, R_t, nullptr, nullptr, x_t + t * n * C, h + t * n * H,          \
                             v + t * n * 4 * H, dh_new + (t + 1) * n * H, dx + t * n * C, dW, dR, \
                             dbx, dbr, dh, dp, dq, mask ? mask + t * n * H : nullptr);            \
            return std::string();                                                                 \
        });                                                                                       \
    }                                                                                             \
    extern "C" int64_t in_place_##name(int N, int C, int H, const T *W, const T *R, const T *bx,  \
                                       const T *br, const T *x, T *h, T *Wx, T *Rh) {             \
        return answer([&] {                                                                       \
            auto &pass = pass_of<ForwardPass<T>>(false, N, C, H, blas, stream);                   \
            pass.Iterate(W, R, bx, br, x, h, h, nullptr, Wx, Rh, 0, nullptr);                     \
            return std::string();                                                                 \
        });                                                                                       \
    }

PASSES(float, float)
PASSES(double, double)

// by_steps: 0 for Run, otherwise Iterate; IN_PLACE needs memory of the host
enum { IN_PLACE = 1 };

#define CODES(T, name)                                                                            \
    extern "C" int64_t codes_##name(int threads, int training, int steps, int N, int C, int H,    \
                                    const T *W, const T *R, const int32_t *bx, const int32_t *br, \
                                    const T *x, T *h, float p, const T *mask, const float *scale, \
                                    const float *zero, int by_steps) {                            \
        return answer([&] {                                                                       \
            auto &pass = pass_of<ForwardPass<T>>(training != 0, N, C, H, blas, stream);           \
            pass.set_threads(threads);                                                            \
            const int64_t n = N;                                                                  \
            if (!by_steps)                                                                        \
                pass.Run(steps, W, R, bx, br, x, h, nullptr, nullptr, nullptr, p, mask, scale,    \
                         zero);                                                                   \
            for (int64_t t = 0; by_steps && t < steps; ++t) {                                     \
                T *const state = h + (t + 1) * n * H;                                             \
                const T *before = h + t * n * H;                                                  \
                if (by_steps == IN_PLACE) {                                                       \
                    std::memcpy(state, before, static_cast<size_t>(n * H) * sizeof(T));           \
                    before = state;                                                               \
                }                                                                                 \
                pass.Iterate(W, R, bx, br, x + t * n * C, before, state, nullptr, nullptr,        \
                             nullptr, p, mask ? mask + t * n * H : nullptr, scale, zero);         \
            }                                                                                     \
            return std::string();                                                                 \
        });                                                                                       \
    }                                                                                             \
    extern "C" int64_t codes_backward_##name(                                                     \
        int threads, int steps, int N, int C, int H, const T *W_t, const T *R_t,                  \
        const int32_t *bx, const int32_t *br, const T *x_t, const T *h, const float *dh_new,      \
        float *dx, float *dW, float *dR, float *dbx, float *dbr, float *dh, const T *mask,        \
        const float *scale, const float *zero, int by_steps) {                                    \
        return answer([&] {                                                                       \
            auto &pass = pass_of<BackwardPass<T>>(N, C, H, blas, stream);                         \
            pass.set_threads(threads);                                                            \
            const int64_t n = N;                                                                  \
            if (!by_steps)                                                                        \
                pass.Run(steps, W_t, R_t, bx, br, x_t, h, nullptr, dh_new, dx, dW, dR, dbx, dbr,  \
                         dh, nullptr, nullptr, mask, scale, zero);                                \
            for (int64_t t = steps - 1; by_steps && t >= 0; --t)                                  \
                pass.Iterate(W_t, R_t, bx, br, x_t + t * n * C, h + t * n * H, nullptr,           \
                             dh_new + (t + 1) * n * H, dx + t * n * C, dW, dR, dbx, dbr, dh,      \
                             nullptr, nullptr, mask ? mask + t * n * H : nullptr, scale, zero);   \
            return std::string();                                                                 \
        });                                                                                       \
    }

CODES(int8_t, int8)
CODES(int16_t, int16)
