// Repeats calls of the C++ library and returns their seconds; benchmarks/cpp_library.py loads it.
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "quant_gru/cuda.hpp"
#include "quant_gru/model.hpp"

namespace {

template <class F>
double seconds_of(int64_t count, F f) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

extern "C" {

QUANT_GRU_API void *open_model(const char *path) {
    return new quant_gru::Model(quant_gru::Model::load(path));
}

QUANT_GRU_API void *open_stream(const void *model, int64_t N) {
    return new quant_gru::Stream(static_cast<const quant_gru::Model *>(model)->stream(N));
}

QUANT_GRU_API double time_runs(const void *model, const float *x, int64_t T, int64_t N, float *y,
                               int64_t threads, int64_t count) {
    quant_gru::RunOptions options;
    options.threads = static_cast<int>(threads);
    return seconds_of(
        count, [&] { static_cast<const quant_gru::Model *>(model)->run(x, T, N, y, options); });
}

QUANT_GRU_API double time_steps(void *stream, const float *x, float *y, int64_t count) {
    return seconds_of(count, [&] { static_cast<quant_gru::Stream *>(stream)->step(x, y); });
}

// A call on GPU 0; null, and a message on stdout, if it cannot be prepared.
QUANT_GRU_API void *open_cuda_call(const char *path, int64_t T, int64_t N) {
    try {
        return new quant_gru::cuda::Call(quant_gru::cuda::Model::load(path).prepare(T, N));
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return nullptr;
    }
}

// Starts runs on a stream and does not wait for them.
QUANT_GRU_API double time_cuda_runs(const void *call, const float *x, float *y, void *stream,
                                    int64_t count) {
    quant_gru::cuda::RunOptions options;
    options.stream = stream;
    return seconds_of(
        count, [&] { static_cast<const quant_gru::cuda::Call *>(call)->run(x, y, options); });
}

}  // extern "C"
