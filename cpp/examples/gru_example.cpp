// Calibrates a float GRU, compares its integers with it, and measures both.
//
//     gru_example
//     gru_example --weights gru.safetensors --config gru_quant_bitwidth_config.json --save gru.qgru
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "quant_gru/calibration.hpp"
#include "quant_gru/gru_interface.hpp"
#include "quant_gru/model.hpp"

namespace {

using namespace quant_gru;
using Floats = std::vector<float>;

constexpr const char *kHelp =
    "usage: gru_example [options]\n"
    "  --weights FILE     state_dict of nn.GRU as safetensors; otherwise the weights are random\n"
    "  --input C --hidden H --layers L   sizes of the random GRU (64, 128, 1)\n"
    "  --steps T --batch N               sizes of the input, standard normal (50, 32)\n"
    "  --config FILE      bit-width configuration; otherwise the presets are compared\n"
    "  --method NAME      histogram, minmax, percentile or ema (histogram)\n"
    "  --percentile P     for the method percentile (99.99)\n"
    "  --params FILE      write the parameter file of the last configuration\n"
    "  --save FILE        write the frozen GRU of the last configuration\n"
    "  --threads n        threads of the benchmark (1)\n"
    "  --repeats n        repetitions of the benchmark, 0 for none (15)\n"
    "  --help             show this text\n";

struct Options {
    std::string weights, config, method = "histogram", params, save;
    int64_t input = 64, hidden = 128, layers = 1, steps = 50, batch = 32;
    double percentile = 99.99;
    int threads = 1, repeats = 15;
    bool help = false;
};

int64_t number(const std::string &name, const std::string &text, int64_t least) {
    char *end = nullptr;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end || value < least || value > 1 << 20)
        throw ArgumentError("Expected " + name + " to be an integer of at least " +
                            std::to_string(least) + ", got '" + text + "'");
    return value;
}

Options parse(int count, char **arguments) {
    Options o;
    for (int i = 1; i < count; ++i) {
        const std::string name = arguments[i];
        if (name == "--help" || name == "-h") {
            o.help = true;
            return o;
        }
        if (i + 1 == count) throw ArgumentError("Expected a value after '" + name + "', got none");
        const std::string value = arguments[++i];
        if (name == "--weights")
            o.weights = value;
        else if (name == "--config")
            o.config = value;
        else if (name == "--method")
            o.method = value;
        else if (name == "--params")
            o.params = value;
        else if (name == "--save")
            o.save = value;
        else if (name == "--percentile")
            o.percentile = std::strtod(value.c_str(), nullptr);
        else if (name == "--input")
            o.input = number(name, value, 1);
        else if (name == "--hidden")
            o.hidden = number(name, value, 1);
        else if (name == "--layers")
            o.layers = number(name, value, 1);
        else if (name == "--steps")
            o.steps = number(name, value, 1);
        else if (name == "--batch")
            o.batch = number(name, value, 1);
        else if (name == "--threads")
            o.threads = static_cast<int>(number(name, value, 1));
        else if (name == "--repeats")
            o.repeats = static_cast<int>(number(name, value, 0));
        else
            throw ArgumentError("Expected a known option, got '" + name + "'; see --help");
    }
    return o;
}

Floats normal(int64_t count, unsigned seed) {
    std::mt19937_64 source(seed);
    std::normal_distribution<float> distribution;
    Floats values(static_cast<size_t>(count));
    for (float &value : values) value = distribution(source);
    return values;
}

struct Accuracy {
    double cosine, mse, sqnr;
};

Accuracy compare(const Floats &expected, const Floats &found) {
    double product = 0, squares = 0, found_squares = 0, error = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double a = expected[i], b = found[i];
        product += a * b;
        squares += a * a;
        found_squares += b * b;
        error += (a - b) * (a - b);
    }
    return {product / std::sqrt(squares * found_squares),
            error / static_cast<double>(expected.size()), 10 * std::log10(squares / error)};
}

// Calibrates on x, prints the accuracy of the integers on it, and returns the frozen file.
std::string quantize(const std::string &name, const QuantConfig &config, const FloatGRU &gru,
                     const Floats &x, const Options &o) {
    const GRUShape &shape = gru.shape;
    Calibrator calibrator(shape, gru.cells(), method_of(o.method), o.percentile);
    calibrator.collect(x.data(), o.steps, o.batch);
    const Parameters parameters = calibrator.finalize(config);
    const std::string file = freeze(parameters, gru.cells());
    const auto size =
        static_cast<size_t>(o.steps * o.batch * shape.directions() * shape.hidden_size);
    Floats expected(size), found(size);
    run_float(shape, gru.cells(), x.data(), o.steps, o.batch, expected.data());
    Model::load(file.data(), file.size()).run(x.data(), o.steps, o.batch, found.data());
    const Accuracy a = compare(expected, found);
    std::printf("%-12s %10.6f %12.3e %9.1f\n", name.c_str(), a.cosine, a.mse, a.sqnr);
    if (!o.params.empty()) parameters.save(o.params);
    return file;
}

// Seconds of each call. They take turns of at least 5 ms, and the shortest turn counts.
std::vector<double> seconds(int repeats, const std::vector<std::function<void()>> &calls) {
    using Clock = std::chrono::steady_clock;
    const auto measure = [](const std::function<void()> &call, int64_t count) {
        const auto start = Clock::now();
        for (int64_t i = 0; i < count; ++i) call();
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

void benchmark_shape(int64_t N, int64_t T, int64_t C, int64_t H, const QuantConfig &config,
                     const Options &o) {
    GRUShape shape;
    shape.input_size = C;
    shape.hidden_size = H;
    const FloatGRU gru = FloatGRU::random(shape, 0);
    const Floats x = normal(T * N * C, 1);
    Calibrator calibrator(shape, gru.cells(), Method::minmax);
    calibrator.collect(x.data(), T, N);
    const std::string file = freeze(calibrator.finalize(config), gru.cells());
    const Model model = Model::load(file.data(), file.size());
    const auto size = [](int64_t count) { return static_cast<size_t>(count); };
    Floats W = normal(C * 3 * H, 2), R = normal(H * 3 * H, 3), b(size(3 * H));
    const float spread = 1 / std::sqrt(static_cast<float>(H));
    for (Floats *values : {&W, &R})
        for (float &value : *values) value *= spread;
    Floats h(size((T + 1) * N * H)), Wx(size(T * N * 3 * H)), Rh(size(N * 3 * H));
    ForwardPass<float> pass(false, static_cast<int>(N), static_cast<int>(C), static_cast<int>(H));
    Floats y(size(T * N * H));
    RunOptions options;
    options.threads = o.threads;
    Stream stream = model.stream(N);
    const auto times = seconds(o.repeats, {[&] {
                                               pass.Run(static_cast<int>(T), W.data(), R.data(),
                                                        b.data(), b.data(), x.data(), h.data(),
                                                        nullptr, Wx.data(), Rh.data(), 0, nullptr);
                                           },
                                           [&] { model.run(x.data(), T, N, y.data(), options); },
                                           [&] { stream.step(x.data(), y.data()); }});
    const double real = times[0], codes = times[1], step = times[2];
    const double macs = static_cast<double>(T * N * 3 * H * (C + H));
    std::printf("%4lld %4lld %4lld %4lld %11.1f %11.1f %8.2f %9.1f %10.2f\n",
                static_cast<long long>(N), static_cast<long long>(T), static_cast<long long>(C),
                static_cast<long long>(H), real * 1e6, codes * 1e6, real / codes,
                macs / codes * 1e-9, step * 1e6);
}

void benchmark(const QuantConfig &config, const Options &o) {
    const int64_t shapes[][4] = {{1, 1, 40, 64},      {1, 100, 40, 64},    {1, 100, 64, 128},
                                 {1, 100, 128, 256},  {1, 100, 256, 512},  {32, 100, 64, 128},
                                 {32, 100, 128, 256}, {128, 50, 128, 256}, {512, 20, 100, 100}};
    std::printf("\n   N    T    C    H    float us  integer us    ratio    GMAC/s    step us\n");
    for (const auto &s : shapes) benchmark_shape(s[0], s[1], s[2], s[3], config, o);
}

void run(const Options &o) {
    GRUShape shape;
    shape.input_size = o.input;
    shape.hidden_size = o.hidden;
    shape.num_layers = o.layers;
    const FloatGRU gru = o.weights.empty() ? FloatGRU::random(shape, 0) : FloatGRU::load(o.weights);
    const Floats x = normal(o.steps * o.batch * gru.shape.input_size, 1);
    std::printf("GRU(%lld, %lld), %lld layers%s; %lld steps of %lld sequences; method %s\n\n",
                static_cast<long long>(gru.shape.input_size),
                static_cast<long long>(gru.shape.hidden_size),
                static_cast<long long>(gru.shape.num_layers),
                gru.shape.bidirectional ? ", both directions" : "", static_cast<long long>(o.steps),
                static_cast<long long>(o.batch), o.method.c_str());
    std::printf("%-12s %10s %12s %9s\n", "", "cosine", "MSE", "SQNR dB");
    std::vector<std::pair<std::string, QuantConfig>> configs = {
        {"int16", QuantConfig::int16()},
        {"w8a16", QuantConfig::w8a16()},
        {"int8_wide", QuantConfig::int8_wide()},
        {"int8", QuantConfig::int8()}};
    if (!o.config.empty()) configs = {{"config", QuantConfig::from_json(o.config)}};
    std::string file;
    for (const auto &[name, config] : configs) file = quantize(name, config, gru, x, o);
    if (!o.save.empty()) {
        std::ofstream stream(o.save, std::ios::binary);
        stream.write(file.data(), static_cast<std::streamsize>(file.size()));
        if (!stream.flush()) throw FileError("Expected a writable file, got '" + o.save + "'");
    }
    if (o.repeats) benchmark(configs.back().second, o);
}

}  // namespace

int main(int count, char **arguments) {
    try {
        const Options options = parse(count, arguments);
        if (options.help)
            std::fputs(kHelp, stdout);
        else
            run(options);
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "gru_example: %s\n", error.what());
        return 1;
    }
}
