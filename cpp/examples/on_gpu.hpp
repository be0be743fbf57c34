// The GPU half of gru_example.
#pragma once

#include "benchmark.hpp"

void benchmark_on_gpu(const quant_gru::QuantConfig &config, int repeats);

// Runs a frozen GRU on a GPU; x is (T, N, C). Returns y. Throws DeviceError.
Floats run_on_gpu(const std::string &file, const Floats &x, int64_t T, int64_t N);
