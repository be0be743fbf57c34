#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cpu/core/memory.hpp"
#include "network.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr size_t kLargestCode = 8;  // bytes

}  // namespace

struct Stream::State {
    State(std::shared_ptr<const Network> of, int64_t rows)
        : network(std::move(of)),
          N(rows),
          layers(network->shape().num_layers),
          codes(static_cast<size_t>(layers * N * network->shape().hidden_size) * kLargestCode),
          workspace(static_cast<size_t>(network->step_workspace(N))),
          is_nan(static_cast<size_t>(N)) {
        char *at = static_cast<char *>(codes.data);
        for (int64_t i = 0; i < layers; ++i)
            states.push_back(at + static_cast<size_t>(i * N * network->shape().hidden_size) *
                                      kLargestCode);
    }

    std::shared_ptr<const Network> network;
    int64_t N, layers;
    Aligned codes, workspace;
    std::vector<void *> states;   // codes of output.h of each layer (N, H)
    std::vector<uint8_t> is_nan;  // rows that received NaN
    bool any_nan = false;
};

Stream::Stream(std::shared_ptr<const Network> network, int64_t N) {
    const Shape &shape = network->shape();
    if (shape.directions != 1)
        throw ArgumentError(
            "Expected a GRU of one direction to stream, got a bidirectional one: its reverse "
            "direction starts at the end of the sequence");
    if (N < 1 || N > std::numeric_limits<int32_t>::max())
        throw ArgumentError("Expected N to be in [1, 2^31 - 1], got " + std::to_string(N));
    state_ = std::make_unique<State>(std::move(network), N);
    reset();
}

Stream::Stream(Stream &&) noexcept = default;
Stream &Stream::operator=(Stream &&) noexcept = default;
Stream::~Stream() = default;

void Stream::reset() noexcept {
    State &s = *state_;
    s.network->clear(s.N, s.states.data());
    std::fill(s.is_nan.begin(), s.is_nan.end(), uint8_t{0});
    s.any_nan = false;
}

void Stream::step(const float *x, float *y) noexcept {
    State &s = *state_;
    const bool nan = s.network->step(x, s.N, s.states.data(), y, s.workspace.data);
    if (!nan && !s.any_nan) return;
    const int64_t C = s.network->shape().input_size, H = s.network->shape().hidden_size;
    s.any_nan = true;
    for (int64_t row = 0; row < s.N; ++row) {
        uint8_t &is_nan = s.is_nan[static_cast<size_t>(row)];
        for (const float *v = x + row * C; !is_nan && v != x + (row + 1) * C; ++v)
            is_nan = *v != *v;
        if (is_nan) std::fill_n(y + row * H, H, std::numeric_limits<float>::quiet_NaN());
    }
}

}  // namespace quant_gru
