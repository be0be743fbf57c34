// Repeats calls of the C++ library and returns their seconds; benchmarks/cpp_library.py loads it.
#include <chrono>
#include <cstdint>

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

}  // extern "C"
