// All integers of one layer and direction.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
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

// Codes of W or R and its bias, rows update, reset, candidate.
struct WeightCodes {
    std::vector<int64_t> codes, bias_codes;  // (3H, K), (3H)
    std::vector<float> scales, bias_scales;  // (3H)
};

// The numbers of W or R that follow from its codes.
struct WeightNumbers {
    std::vector<int64_t> codes;       // (3H, K)
    std::vector<int64_t> bias, M, k;  // (3H)
    int bias_shift = 0;               // the unit of `bias` is 2^bias_shift
};

// weight: Operator::W or Operator::R. K: columns. Throws ArgumentError if a value is not finite.
WeightCodes weight_codes(const CellParameters &cell, Operator weight, const FloatCell &values,
                         int64_t H, int64_t K);
WeightNumbers weight_numbers(const CellParameters &cell, Operator weight, WeightCodes codes);

// The file of a frozen GRU. weights: W and R of each cell.
std::string frozen_file(const Parameters &parameters, const std::vector<WeightNumbers> &weights,
                        bool batch_first);

// Adds the quantizers of sigmoid and tanh outputs, from the ranges of the functions.
void set_fixed_ranges(CellParameters &cell);

// Builds the three tables between the quantizers of a cell.
void build_tables(CellParameters &cell);

}  // namespace quant_gru
