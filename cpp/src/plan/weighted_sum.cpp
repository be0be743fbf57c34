#include "plan/weighted_sum.hpp"

#include <algorithm>
#include <cmath>

#include "plan/natural.hpp"

namespace quant_gru {
namespace {

constexpr int kTierBits[] = {24, 31, 53, 62};  // tiers a, b, c, d: sums are below 2^bits
constexpr int kTiers = 4;

std::vector<uint64_t> multipliers(const std::vector<SumTerm> &terms, int k) {
    std::vector<uint64_t> Ms;
    for (const SumTerm &term : terms)
        Ms.push_back(static_cast<uint64_t>(std::rint(std::ldexp(term.ratio, k))));
    return Ms;
}

Natural total(const std::vector<SumTerm> &terms, const std::vector<uint64_t> &Ms) {
    Natural sum;
    for (size_t i = 0; i < terms.size(); ++i) sum = sum + Natural(Ms[i]) * Natural(terms[i].bound);
    return sum;
}

bool fits(int tier, const std::vector<SumTerm> &terms, int k) {
    Natural sum = total(terms, multipliers(terms, k));
    if (tier > 0 && k >= 1) sum = sum + (Natural(1) << (k - 1));
    return sum < (Natural(1) << kTierBits[tier]);
}

// Whether multipliers fit 64 bits and the rounded sum 128.
bool fits_words(const std::vector<SumTerm> &terms, int k) {
    for (const SumTerm &term : terms)
        if (!(std::rint(std::ldexp(term.ratio, k)) < 0x1p63)) return false;
    return total(terms, multipliers(terms, k)) + (Natural(1) << std::max(k - 1, 0)) <
           (Natural(1) << 127);
}

uint64_t largest(const std::vector<SumTerm> &terms, int k) {
    const auto Ms = multipliers(terms, k);
    return *std::max_element(Ms.begin(), Ms.end());
}

// Whether rounding the multipliers changes a sum by at most 2^-log2 codes of the result:
// sum |ratio 2^k - M| V <= 2^(k - log2). Both sides are multiplied by a power of two that makes
// them integers.
bool is_accurate(const std::vector<SumTerm> &terms, int k, int log2) {
    struct Part {
        uint64_t digits;
        int exponent;
    };
    std::vector<Part> parts;
    int least = k - log2;
    for (const SumTerm &term : terms) {
        const double scaled = std::ldexp(term.ratio, k);
        int exponent = 0;
        const double mantissa = std::frexp(std::fabs(scaled - std::rint(scaled)), &exponent);
        parts.push_back({static_cast<uint64_t>(std::ldexp(mantissa, 53)), exponent - 53});
        if (parts.back().digits) least = std::min(least, exponent - 53);
    }
    Natural sum;
    for (size_t i = 0; i < parts.size(); ++i)
        if (parts[i].digits)
            sum = sum + (Natural(parts[i].digits) * Natural(terms[i].bound)
                         << (parts[i].exponent - least));
    return !((Natural(1) << (k - log2 - least)) < sum);
}

// The largest k of the first tier in which the largest multiplier has at least so many bits.
int shift_of_a_tier(const std::vector<SumTerm> &terms, int most, int least_bits) {
    for (int tier = 0; tier < kTiers; ++tier)
        for (int k = most; largest(terms, k) >> (least_bits - 1); --k)
            if (fits(tier, terms, k)) return k;
    return most;
}

int accurate_shift(const std::vector<SumTerm> &terms, int k) {
    while (fits_words(terms, k + 1))
        if (is_accurate(terms, ++k, 4)) break;
    return k;
}

}  // namespace

Multipliers one_term(double ratio, int p) {
    int exponent = 0;
    const double mantissa = std::frexp(ratio, &exponent);
    auto M = static_cast<int64_t>(std::rint(std::ldexp(mantissa, p)));
    int k = p - exponent;
    if (M == int64_t{1} << p) {
        M >>= 1;
        --k;
    }
    return {{M}, k};
}

Multipliers several_terms(const std::vector<SumTerm> &terms, int bits, bool pot) {
    double ratio = 0;
    unsigned __int128 bound = 0;
    for (const SumTerm &term : terms) {
        ratio = std::max(ratio, term.ratio);
        bound = std::max(bound, term.bound);
    }
    int exponent = 0;
    std::frexp(ratio, &exponent);
    int k = 24 - exponent;
    if (largest(terms, k) == uint64_t{1} << 24) --k;
    if (!pot) k = shift_of_a_tier(terms, k, bits + 4);
    const bool in_float32 = bound <= 1 << 16 && fits(0, terms, k);
    if (!is_accurate(terms, k, in_float32 ? 1 : 4)) k = accurate_shift(terms, k);
    auto Ms = multipliers(terms, k);
    if (pot) {
        int common = 64;
        for (uint64_t M : Ms)
            for (int bit = 0; M && bit < common; ++bit)
                if (M >> bit & 1) common = bit;
        for (uint64_t &M : Ms) M >>= common;
        k -= common;
    }
    return {{Ms.begin(), Ms.end()}, k};
}

}  // namespace quant_gru
