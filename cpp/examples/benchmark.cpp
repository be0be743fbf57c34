#include "benchmark.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>

#include "quant_gru/gru_interface.hpp"
#include "quant_gru/model.hpp"

using namespace quant_gru;

const int64_t kShapes[9][4] = {{1, 1, 40, 64},      {1, 100, 40, 64},    {1, 100, 64, 128},
                               {1, 100, 128, 256},  {1, 100, 256, 512},  {32, 100, 64, 128},
                               {32, 100, 128, 256}, {128, 50, 128, 256}, {512, 20, 100, 100}};

Floats normal(int64_t count, unsigned seed) {
    std::mt19937_64 source(seed);
    std::normal_distribution<float> distribution;
    Floats values(static_cast<size_t>(count));
    for (float &value : values) value = distribution(source);
    return values;
}

std::vector<double> seconds(int repeats, const std::vector<std::function<void()>> &calls,
                            const std::function<void()> &wait) {
    using Clock = std::chrono::steady_clock;
    const auto measure = [&wait](const std::function<void()> &call, int64_t count) {
        wait();
        const auto start = Clock::now();
        for (int64_t i = 0; i < count; ++i) call();
        wait();
        return std::chrono::duration<double>(Clock::now() - start).count() /
               static_cast<double>(count);
    };
    std::vector<double> shortest;
    std::vector<int64_t> counts;
    for (const auto &call : calls) {
        shortest.push_back(std::min(measure(call, 1), measure(call, 1)));
        counts.push_back(std::max<int64_t>(1, static_cast<int64_t>(5e-3 / shortest.back())));
    }
    for (int round = 0; round < repeats; ++round)
        for (size_t i = 0; i < calls.size(); ++i)
            shortest[i] = std::min(shortest[i], measure(calls[i], counts[i]));
    return shortest;
}

Shaped::Shaped(const int64_t (&sizes)[4], const QuantConfig &config)
    : N(sizes[0]),
      T(sizes[1]),
      C(sizes[2]),
      H(sizes[3]),
      x(normal(T * N * C, 1)),
      W(normal(C * 3 * H, 2)),
      R(normal(H * 3 * H, 3)),
      b(static_cast<size_t>(3 * H)) {
    GRUShape shape;
    shape.input_size = C;
    shape.hidden_size = H;
    const FloatGRU gru = FloatGRU::random(shape, 0);
    Calibrator calibrator(shape, gru.cells(), Method::minmax);
    calibrator.collect(x.data(), T, N);
    file = freeze(calibrator.finalize(config), gru.cells());
    const float spread = 1 / std::sqrt(static_cast<float>(H));
    for (Floats *values : {&W, &R})
        for (float &value : *values) value *= spread;
}

std::string text_of(const Shaped &s) {
    char text[32];
    std::snprintf(text, sizeof text, "%4lld %4lld %4lld %4lld", static_cast<long long>(s.N),
                  static_cast<long long>(s.T), static_cast<long long>(s.C),
                  static_cast<long long>(s.H));
    return text;
}

static void benchmark_shape(const Shaped &s, int threads, int repeats) {
    const Model model = Model::load(s.file.data(), s.file.size());
    const int64_t N = s.N, T = s.T, H = s.H;
    const auto size = [](int64_t count) { return static_cast<size_t>(count); };
    Floats h(size((T + 1) * N * H)), Wx(size(T * N * 3 * H)), Rh(size(N * 3 * H));
    Floats y(size(T * N * H));
    ForwardPass<float> pass(false, static_cast<int>(N), static_cast<int>(s.C), static_cast<int>(H));
    pass.set_threads(threads);
    RunOptions options;
    options.threads = threads;
    Stream stream = model.stream(N);
    const auto run_floats = [&] {
        pass.Run(static_cast<int>(T), s.W.data(), s.R.data(), s.b.data(), s.b.data(), s.x.data(),
                 h.data(), nullptr, Wx.data(), Rh.data(), 0, nullptr);
    };
    const auto times = seconds(repeats,
                               {run_floats, [&] { model.run(s.x.data(), T, N, y.data(), options); },
                                [&] { stream.step(s.x.data(), y.data()); }},
                               [] {});
    const double real = times[0], codes = times[1], step = times[2];
    const double macs = static_cast<double>(T * N * 3 * H * (s.C + H));
    std::printf("%s %11.1f %11.1f %8.2f %9.1f %10.2f\n", text_of(s).c_str(), real * 1e6,
                codes * 1e6, real / codes, macs / codes * 1e-9, step * 1e6);
}

void benchmark(const QuantConfig &config, int threads, int repeats) {
    std::printf("\n   N    T    C    H    float us  integer us    ratio    GMAC/s    step us\n");
    for (const auto &sizes : kShapes) benchmark_shape(Shaped(sizes, config), threads, repeats);
}
