// Launches between real values and codes of at most 16 bits, in training.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/host/launches.hpp"

namespace quant_gru::cuda {

// Quantizes or dequantizes rows, see quantize_dequantize.cu.
Draft<BorderC> border_of(const QuantizerNumbers &q, int64_t rows, int64_t features);

// Masks a gradient where values (T, N, features) with strides of steps and rows were clamped.
Draft<MaskC> mask_of(const QuantizerNumbers &q, int64_t step, int64_t next,
                     const std::array<int64_t, 3> &shape);

// A direction of the layer below: its states, and how they become the input, by one term.
struct Below {
    QuantizerNumbers h;
    SumNumbers sum;
};

// Requantizes codes (rows, H) of each direction, or masks the gradient where that clamps.
Draft<RequantizeCodesC> requantization_of(const std::vector<Below> &below,
                                          const QuantizerNumbers &above, int64_t rows, int64_t H);

// Draws random events (A, B, C), see random_events.cu.
struct EventsC {
    Address seed, events;
    int64_t A, B, C, chance, stream;
};
Launch events_of(const EventsC &events);

}  // namespace quant_gru::cuda
