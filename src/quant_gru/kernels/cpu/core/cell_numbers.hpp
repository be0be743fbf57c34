// The numbers of a cell as a plan defines them. Everything that kernels need beyond them is derived
// here: limits minus zero points, and which arithmetic is exact.
#pragma once

#include "cpu/core/boundary.hpp"
#include "cpu/core/plan.hpp"

namespace quant_gru {

// Codes of `bits` bits; the real value is scale * (code - zero).
struct QuantizerNumbers {
    int bits = 0;  // 0: a product that is fused, so it has no code
    bool is_signed = true;
    float scale = 1;
    int64_t zero = 0;  // beyond the codes of x where ranges exclude 0; see `inner`

    bool present() const { return bits > 0; }
    int64_t lo() const { return is_signed ? -(int64_t{1} << (bits - 1)) : 0; }
    int64_t hi() const { return (int64_t{1} << (is_signed ? bits - 1 : bits)) - 1; }
    // The largest |code - zero|.
    int64_t reach() const { return zero - lo() > hi() - zero ? zero - lo() : hi() - zero; }
    Container container() const;
    // The same codes with the nearest one as zero point: what the cell computes with.
    QuantizerNumbers inner() const {
        QuantizerNumbers q = *this;
        q.zero = zero < lo() ? lo() : zero > hi() ? hi() : zero;
        return q;
    }
};

// A weighted sum of one or two terms: (M[0] v1 + M[1] v2) / 2^k, rounded.
struct SumNumbers {
    int terms = 0;  // 0: absent
    int64_t k = 0, M[2] = {0, 0};
};

struct TableNumbers {
    int64_t segments = 0;
    int degree = 0, shift = 0, segment_shift = -1;
    int64_t last = 0, zero = 0, lo = 0, hi = 0;  // codes
    const int64_t *bounds = nullptr, *coefficients = nullptr;
};

// W or R with the numbers of its rows; the sum of row c is M[c] v / 2^k[c], rounded.
struct MatrixNumbers {
    int inputs = 0, weight_bits = 0;
    const void *codes = nullptr;  // (3H, inputs)
    Container kind = Container::i8;
    const int64_t *bias = nullptr, *M = nullptr, *k = nullptr;  // (3H)
};

struct CellNumbers {
    int H = 0;
    int rounding = QG_HALF_EVEN;
    int rounding_input = QG_HALF_EVEN;  // of real values
    int64_t one = 0;
    QuantizerNumbers x, h, Wx, Rh, z_pre, r_pre, g_pre, z, r, g, rRh, old_contrib, new_contrib;
    struct {
        SumNumbers z_pre, r_pre, g_pre, rRh, old_contrib, new_contrib, h, zoneout;
    } sums;
    struct {
        TableNumbers z, r, g;
    } tables;
    MatrixNumbers W, R;
};

// Significant bits of the multiplier of one term, for operands of `width` bits in total.
constexpr int significant_bits(int width) { return width > 16 && width <= 32 ? 16 : 24; }

// The unit of a bias is 2^bias_shift accumulator units.
constexpr int bias_shift(int weight_bits, int operand_bits) {
    return weight_bits + operand_bits > 48 ? weight_bits + operand_bits - 48 : 0;
}

// The largest |bias|.
constexpr int64_t bias_limit(int weight_bits, int operand_bits) {
    if (weight_bits <= 8 && operand_bits <= 8) return int64_t{1} << 30;
    return int64_t{1} << (weight_bits + operand_bits <= 32 ? 46 : 62);
}

// The tier of a sum of terms |v_i| <= V[i]: the first of 'a' to 'd' that holds it, else 'e'.
int tier_of(const SumNumbers &sum, const uint64_t (&V)[2]);

// The same numbers in the form that kernels read.
Quantizer quantizer_of(const QuantizerNumbers &numbers, int rule = QG_HALF_EVEN);

// The plan of a cell. Its arrays remain those of `numbers`.
LayerPlan layer_plan(const CellNumbers &numbers);

// The conversion of state codes `below` to input codes `above`, by a sum of one term.
Requantizer requantizer(const SumNumbers &sum, const QuantizerNumbers &below,
                        const QuantizerNumbers &above, int rule = QG_HALF_EVEN);

}  // namespace quant_gru
