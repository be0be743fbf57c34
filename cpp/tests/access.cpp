// The library for tests from Python, by ctypes.
#include "quant_gru/gru_interface.hpp"

using namespace quant_gru;

#define PASSES(T, name)                                                                           \
    extern "C" void forward_##name(int training, int steps, int N, int C, int H, const T *W,      \
                                   const T *R, const T *bx, const T *br, const T *x, T *h, T *v,  \
                                   T *Wx, T *Rh, float p, const T *mask, int by_steps) {          \
        ForwardPass<T> pass(training, N, C, H, nullptr, nullptr);                                 \
        if (!by_steps) return pass.Run(steps, W, R, bx, br, x, h, v, Wx, Rh, p, mask);            \
        const int64_t n = N;                                                                      \
        for (int64_t t = 0; t < steps; ++t)                                                       \
            pass.Iterate(W, R, bx, br, x + t * n * C, h + t * n * H, h + (t + 1) * n * H,         \
                         v ? v + t * n * 4 * H : nullptr, Wx + t * n * 3 * H, Rh, p,              \
                         mask ? mask + t * n * H : nullptr);                                      \
    }                                                                                             \
    extern "C" void backward_##name(int steps, int N, int C, int H, const T *W_t, const T *R_t,   \
                                    const T *x_t, const T *h, const T *v, const T *dh_new, T *dx, \
                                    T *dW, T *dR, T *dbx, T *dbr, T *dh, T *dp, T *dq,            \
                                    const T *mask, int by_steps) {                                \
        BackwardPass<T> pass(N, C, H, nullptr, nullptr);                                          \
        if (!by_steps)                                                                            \
            return pass.Run(steps, W_t, R_t, nullptr, nullptr, x_t, h, v, dh_new, dx, dW, dR,     \
                            dbx, dbr, dh, dp, dq, mask);                                          \
        /* here x_t is (T, C, N), and h (T, H, N), as Iterate expects them */                     \
        const int64_t n = N;                                                                      \
        for (int64_t t = steps - 1; t >= 0; --t)                                                  \
            pass.Iterate(W_t, R_t, nullptr, nullptr, x_t + t * n * C, h + t * n * H,              \
                         v + t * n * 4 * H, dh_new + (t + 1) * n * H, dx + t * n * C, dW, dR,     \
                         dbx, dbr, dh, dp, dq, mask ? mask + t * n * H : nullptr);                \
    }

PASSES(float, float)
PASSES(double, double)
