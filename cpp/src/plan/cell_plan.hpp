// All integers of one layer and direction.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "plan/weighted_sum.hpp"
#include "quant_gru/parameters.hpp"

namespace quant_gru {

// The part that calibration fixes. A fused product has no sum.
struct FrozenNumbers {
    int64_t one = 0;  // the real value 1 in codes of gate.z_out
    std::vector<std::pair<Operator, Multipliers>> sums;
    std::optional<Multipliers> zoneout;
};

FrozenNumbers frozen_numbers(const CellParameters &cell, double zoneout);

// The numbers of W or R and its bias, rows update, reset, candidate.
struct WeightNumbers {
    std::vector<int64_t> codes;                      // (3H, K)
    std::vector<int64_t> bias_codes, bias, M, k;     // (3H)
    std::vector<double> scales, bias_scales;         // (3H), float32 numbers
    int bias_shift = 0;                              // the unit of `bias` is 2^bias_shift
};

// weight: Operator::W or Operator::R. K: columns. Throws ArgumentError if a value is not finite.
WeightNumbers matrix_numbers(const CellParameters &cell, Operator weight, const FloatCell &values,
                             int64_t H, int64_t K);

// Completes calibrated quantizers of a cell with those of fixed range, and builds its tables.
void complete(CellParameters &cell);

// The quantizer of an output of sigmoid or tanh, from the range of the function.
ActivationQuantizer fixed_range_quantizer(Operator op, const OperatorConfig &config,
                                          ScaleKind kind);

}  // namespace quant_gru
