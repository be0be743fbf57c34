// Scales of operators from files, and their rules.
#pragma once

#include <vector>

#include "quant_gru/parameters.hpp"

namespace quant_gru {

bool is_power_of_two(double value);

// Sets the quantizer of an activation, whose width and kind `cell.config` has. Scales of sigmoid
// outputs are rounded to 1 / integer, so that 1 is a code. Throws FileError if a rule is broken.
// far: whether the zero point may be no code.
void set_quantizer(CellParameters &cell, Operator op, double scale, int64_t zero_point,
                   bool far = false);

// Sets scales of a weight or bias, rows r, z, n: one per tensor, gate or channel of 3H rows. Throws
// FileError if a rule is broken.
void set_pinned(CellParameters &cell, Operator op, std::vector<double> scales, int64_t H);

}  // namespace quant_gru
