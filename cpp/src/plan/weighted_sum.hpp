// Multipliers and shifts of weighted sums, docs/arithmetic.md#2-one-primitive-weighted_sum.
#pragma once

#include <cstdint>
#include <vector>

namespace quant_gru {

// (M_1 v_1 + .. ) / 2^k
struct Multipliers {
    std::vector<int64_t> M;
    int k = 0;
};

struct SumTerm {
    double ratio;             // scale of the term over the scale of the result
    unsigned __int128 bound;  // V: the largest |v|
};

// The ratio rounded to p significant bits.
Multipliers one_term(double ratio, int p);

// One shift for all terms. bits: width of the result. pot: whether all scales are powers of two.
Multipliers several_terms(const std::vector<SumTerm> &terms, int bits, bool pot);

}  // namespace quant_gru
