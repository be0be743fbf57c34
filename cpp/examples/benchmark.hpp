// The benchmark of gru_example.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "quant_gru/calibration.hpp"

using Floats = std::vector<float>;

// Standard normal values.
Floats normal(int64_t count, unsigned seed);

// Seconds of each call. They take turns of at least 5 ms, and the shortest turn counts. `wait`
// returns when all calls have ended.
std::vector<double> seconds(int repeats, const std::vector<std::function<void()>> &calls,
                            const std::function<void()> &wait);

// A random GRU of one layer with its input, as floats and frozen.
struct Shaped {
    Shaped(const int64_t (&sizes)[4], const quant_gru::QuantConfig &config);

    int64_t N, T, C, H;
    Floats x, W, R, b;  // W and R as passes over pointers expect them
    std::string file;
};

// N, T, C and H of each row of the table.
extern const int64_t kShapes[9][4];

// The sizes of a row.
std::string text_of(const Shaped &s);

void benchmark(const quant_gru::QuantConfig &config, int threads, int repeats);
