// The sizes of a pass, and checks of its arguments.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quant_gru/model.hpp"

namespace quant_gru {

struct PassSizes {
    int64_t N, C, H;

    PassSizes(int batch_size, int input_size, int hidden_size)
        : N(positive("batch_size", batch_size)),
          C(positive("input_size", input_size)),
          H(positive("hidden_size", hidden_size)) {}

    static int64_t positive(const char *name, int value) {
        if (value < 1)
            throw ArgumentError("Expected " + std::string(name) + " to be positive, got " +
                                std::to_string(value));
        return value;
    }
};

inline void check_steps(int steps) {
    if (steps < 0)
        throw ArgumentError("Expected steps to be at least 0, got " + std::to_string(steps));
}

inline void check_zoneout(float probability) {
    if (!(probability >= 0 && probability <= 1))
        throw ArgumentError("Expected zoneout_prob to be in [0, 1], got " +
                            std::to_string(probability));
}

inline int checked_threads(int threads) {
    if (threads < 0)
        throw ArgumentError("Expected threads to be at least 0, got " + std::to_string(threads));
    return threads;
}

// 1 where a mask is 0: units that keep their state.
template <class T>
std::vector<uint8_t> held_units(const T *mask, int64_t count) {
    std::vector<uint8_t> held(static_cast<size_t>(count));
    for (size_t i = 0; i < held.size(); ++i) held[i] = mask[i] == 0;
    return held;
}

}  // namespace quant_gru
