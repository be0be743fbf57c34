// The constants of saturating.cuh: gates in fractions of 256.
#pragma once

#include <optional>

#include "cpu/core/cell_numbers.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// The constants, or nothing if that arithmetic would not be exact. It is exact if codes have at
// most 8 bits, all multipliers are powers of two, and the sums have few fraction bits.
std::optional<SaturatedC> saturated_numbers(const CellNumbers &numbers);

}  // namespace quant_gru::cuda
