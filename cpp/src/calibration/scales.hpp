// The scales of a cell whose effect on its states is least: the rules of calibration/effects.py,
// calibration/guard.py and calibration/collector.py.
#pragma once

#include <array>

#include "calibration/cell_steps.hpp"
#include "quant_gru/calibration.hpp"

namespace quant_gru {

using Observers = std::array<Observer, kOperators>;

// Returns `plain` with other quantizers if the integer cell is closer to the float cell with them.
// Tables and fixed ranges are set. steps: those of the float cell.
CellParameters searched_scales(const CellParameters &plain, const Observers &observers,
                               const CellSteps &steps, const FloatCell &weights);

// Adds what follows from the calibrated quantizers.
void complete(CellParameters &cell);

}  // namespace quant_gru
