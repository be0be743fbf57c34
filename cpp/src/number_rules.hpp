// The ranges of the numbers of a plan. Each function throws FileError if a number breaks a rule.
#pragma once

#include <string>
#include <vector>

#include "cpu/core/cell_numbers.hpp"

namespace quant_gru {

// The largest |code - zero point| if the zero point is no code: exact in float32.
constexpr int64_t kFarthest = int64_t{1} << 21;

// Width and sign of the codes lo..hi. far: whether the zero point may be no code.
QuantizerNumbers checked_quantizer(int64_t lo, int64_t hi, int64_t zero, float scale,
                                   const std::string &name, bool far = false);

void check_range(const std::vector<int64_t> &values, int64_t least, int64_t most,
                 const std::string &name);

void check_table(const TableNumbers &table, const QuantizerNumbers &pre,
                 const QuantizerNumbers &out, const std::string &name);

// The shift and the multipliers of a sum of one or two terms, apart from `check_sums`.
void check_sum(const SumNumbers &sum, const std::string &name);

// The most inputs of a matrix product whose accumulators fit 64 bits. Wide kernels multiply the
// weights by 17-bit halves of the operand; `reach` is its largest magnitude.
int64_t most_inputs(int weight_bits, int64_t reach);

// Whether sums of two terms fit 128 bits and wide accumulators 64. The rest of `cell` is checked.
void check_sums(const CellNumbers &cell, const std::string &name);

}  // namespace quant_gru
