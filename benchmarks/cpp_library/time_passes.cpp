// Repeats passes of the C++ library; benchmarks/cpp_passes.py loads it.
#include <chrono>
#include <cstdint>

#include "quant_gru/gru_interface.hpp"

using namespace quant_gru;

namespace {

struct Passes {
    Passes(bool training, int N, int C, int H, cublasHandle_t blas, cudaStream_t stream)
        : forward(training, N, C, H, blas, stream), backward(N, C, H, blas, stream) {}

    ForwardPass<float> forward;
    BackwardPass<float> backward;
};

// Fields in the order of the arguments of `Run`. v is null without training.
struct Arrays {
    const float *W, *R, *bx, *br, *x;
    float *h, *v, *tmp_Wx, *tmp_Rh;
    const float *W_t, *R_t, *x_t, *dh_new;
    float *dx, *dW, *dR, *dbx, *dbr, *dh, *dp, *dq;
};

}  // namespace

extern "C" {

QUANT_GRU_API void *open_passes(int training, int N, int C, int H, void *blas, void *stream,
                                int threads) {
    auto *passes = new Passes(training != 0, N, C, H, static_cast<cublasHandle_t>(blas),
                              static_cast<cudaStream_t>(stream));
    passes->forward.set_threads(threads);
    passes->backward.set_threads(threads);
    return passes;
}

// Runs forward and, if there is a v, backward. Returns the seconds of all calls.
QUANT_GRU_API double time_passes(void *opened, int steps, const Arrays *arrays, int64_t count) {
    Passes &passes = *static_cast<Passes *>(opened);
    const Arrays &a = *arrays;
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) {
        passes.forward.Run(steps, a.W, a.R, a.bx, a.br, a.x, a.h, a.v, a.tmp_Wx, a.tmp_Rh, 0,
                           nullptr);
        if (a.v)
            passes.backward.Run(steps, a.W_t, a.R_t, a.bx, a.br, a.x_t, a.h, a.v, a.dh_new, a.dx,
                                a.dW, a.dR, a.dbx, a.dbr, a.dh, a.dp, a.dq, nullptr);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // extern "C"
