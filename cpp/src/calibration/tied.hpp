// One quantizer for input.x and output.h of a GRU (tie_x_and_h in the configuration).
#pragma once

#include <array>
#include <vector>

#include "quant_gru/calibration.hpp"

namespace quant_gru {

// Adds the input and the states of all layers and directions to `both`, an empty observer of the
// same method. The inputs of the layers above are states of those below, and both directions have
// the same input. Throws ArgumentError if the two operators have different widths or kinds.
Observer tied_observer(const std::vector<std::array<Observer, kOperators>> &observers,
                       const QuantConfig &config, Observer both);

}  // namespace quant_gru
