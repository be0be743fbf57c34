// Calibrates a float GRU, compares its integers with it, and measures both.
//
//     gru_example
//     gru_example --cuda
//     gru_example --weights gru.safetensors --config gru_quant_bitwidth_config.json --save
//     out.safetensors
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmark.hpp"
#include "on_gpu.hpp"
#include "quant_gru/model.hpp"

namespace {

using namespace quant_gru;

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
    "  --cuda             compare integers of GPU 0 with those of the CPU, and measure on it\n"
    "  --repeats n        repetitions of the benchmark, 0 for none (15)\n"
    "  --help             show this text\n";

struct Options {
    std::string weights, config, method = "histogram", params, save;
    int64_t input = 64, hidden = 128, layers = 1, steps = 50, batch = 32;
    double percentile = 99.99;
    int threads = 1, repeats = 15;
    bool cuda = false, help = false;
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
        if (name == "--cuda") {
            o.cuda = true;
            continue;
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

// Compares the integers of a GPU with those of the CPU.
void compare_on_gpu(const std::string &file, const Floats &x, const Floats &expected,
                    const Options &o) {
    const Floats found = run_on_gpu(file, x, o.steps, o.batch);
    size_t different = 0;
    for (size_t i = 0; i < expected.size(); ++i) different += expected[i] != found[i];
    if (different)
        throw std::runtime_error("Expected the values of the CPU from a GPU, got " +
                                 std::to_string(different) + " others");
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
    if (o.cuda) compare_on_gpu(file, x, found, o);
    std::printf("%-12s %10.6f %12.3e %9.1f%s\n", name.c_str(), a.cosine, a.mse, a.sqnr,
                o.cuda ? "  the same on the GPU" : "");
    if (!o.params.empty()) parameters.save(o.params);
    return file;
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
    const QuantConfig &measured = configs.back().second;
    if (o.repeats && o.cuda)
        benchmark_on_gpu(measured, o.repeats);
    else if (o.repeats)
        benchmark(measured, o.threads, o.repeats);
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
