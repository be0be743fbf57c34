#include "cpu/core/cell_numbers.hpp"

#include <algorithm>
#include <cmath>

namespace quant_gru {
namespace {

constexpr int kNarrowBits = 16;
constexpr int kMultiplierBits = 24;  // of products of a layer above, see boundary.cpp
// No bound of a tier exceeds 2^63, so larger values need not be distinguished.
constexpr uint64_t kMost = uint64_t{1} << 63;

uint64_t saturated_product(uint64_t a, uint64_t b) {
    return a && b > kMost / a ? kMost : std::min(a * b, kMost);
}

uint64_t saturated_sum(uint64_t a, uint64_t b) { return a > kMost - b ? kMost : a + b; }

uint64_t power(int64_t exponent) {
    return exponent < 0 ? 0 : exponent < 63 ? uint64_t{1} << exponent : kMost;
}

uint64_t reach_of(const QuantizerNumbers &q) { return static_cast<uint64_t>(q.reach()); }

// The largest |one - code| of the update gate.
uint64_t largest_one_minus(const CellNumbers &n) {
    const int64_t low = n.one - (n.z.lo() - n.z.zero), high = n.one - (n.z.hi() - n.z.zero);
    return static_cast<uint64_t>(std::max(low < 0 ? -low : low, high < 0 ? -high : high));
}

// The bounds of the three products of two codes.
struct Products {
    uint64_t rRh, old_contrib, new_contrib;
};

Products products_of(const CellNumbers &n) {
    return {saturated_product(reach_of(n.r), reach_of(n.Rh)),
            saturated_product(reach_of(n.z), reach_of(n.h)),
            saturated_product(largest_one_minus(n), reach_of(n.g))};
}

// The number of bits of the larger of two multipliers.
int bits_of(const int64_t (&M)[2]) {
    int bits = 0;
    for (int64_t left = std::max(M[0], M[1]); left; left >>= 1) ++bits;
    return bits;
}

// The largest |sum| of terms |v_i| <= V[i].
uint64_t total_of(const SumNumbers &sum, const uint64_t (&V)[2]) {
    uint64_t total = 0;
    for (int i = 0; i < sum.terms; ++i)
        total = saturated_sum(total, saturated_product(static_cast<uint64_t>(sum.M[i]), V[i]));
    return total;
}

Sum sum_of(const SumNumbers &n, const QuantizerNumbers &out, int tier, uint64_t bound, int rule) {
    Sum s;
    if (!n.terms) return s;
    s.present = 1;
    s.tier = tier;
    s.k = static_cast<int>(n.k);
    s.lo = out.lo() - out.zero;
    s.hi = out.hi() - out.zero;
    std::copy_n(n.M, 2, s.M);
    s.rule = rule;
    s.first = bits_of(n.M);
    s.bound = static_cast<double>(bound);
    return s;
}

// A product of two codes as its own code. `bits`: of both factors.
Sum product_sum(const SumNumbers &n, const QuantizerNumbers &out, int bits, uint64_t bound,
                int rule) {
    const uint64_t scaled = saturated_product(bound, power(significant_bits(bits)));
    return sum_of(n, out, bits > 32 || scaled >= kMost ? 'e' : 'd', bound, rule);
}

Table table_of(const TableNumbers &n, const QuantizerNumbers &pre, int rule) {
    Table t;
    t.segments = static_cast<int>(n.segments);
    t.degree = n.degree;
    t.shift = n.shift;
    t.segment_shift = n.segment_shift;
    t.last = n.last;
    t.pre_zero = pre.zero;
    t.pre_lo = pre.lo() - pre.zero;
    t.pre_hi = pre.hi() - pre.zero;
    t.lo = n.lo - n.zero;
    t.hi = n.hi - n.zero;
    t.bounds = n.bounds;
    t.coefficients = n.coefficients;
    t.rule = rule;
    return t;
}

Matrix matrix_of(const MatrixNumbers &n, const QuantizerNumbers &given, const QuantizerNumbers &out,
                 int rule) {
    const QuantizerNumbers operand = given.inner();
    Matrix m;
    m.codes = n.codes;
    m.kind = n.kind;
    m.inputs = n.inputs;
    m.bias = n.bias;
    m.M = n.M;
    m.k = n.k;
    m.bias_shift = bias_shift(n.weight_bits, operand.bits);
    m.lo = out.lo() - out.zero;
    m.hi = out.hi() - out.zero;
    m.zero = operand.zero;
    m.moved = operand.zero - given.zero;
    m.least = operand.lo() - operand.zero;
    m.most = operand.hi() - operand.zero;
    m.reach = operand.reach();
    m.weight_bits = n.weight_bits;
    m.operand_bits = operand.bits;
    m.operand_signed = operand.is_signed;
    m.rule = rule;
    m.first = significant_bits(n.weight_bits + operand.bits);
    return m;
}

// The largest |accumulator| without bias.
uint64_t accumulator_bound(const MatrixNumbers &m, const QuantizerNumbers &operand) {
    return saturated_product(saturated_product(static_cast<uint64_t>(m.inputs), reach_of(operand)),
                             power(m.weight_bits - 1));
}

void find_exactness(const CellNumbers &n, const Products &products, LayerPlan &plan) {
    const Cell &cell = plan.cell;
    const Sum *several[] = {&cell.z_pre, &cell.r_pre, &cell.g_pre, &cell.h_new, &cell.zoneout};
    bool all_a = true, none_e = true;
    for (const Sum *s : several)
        if (s->present) {
            all_a = all_a && s->tier == 'a';
            none_e = none_e && s->tier != 'e';
        }
    int widest = std::max(n.W.weight_bits, n.R.weight_bits);
    for (const QuantizerNumbers *q : {&n.x, &n.h, &n.Wx, &n.Rh, &n.z_pre, &n.r_pre, &n.g_pre, &n.z,
                                      &n.r, &n.g, &n.rRh, &n.old_contrib, &n.new_contrib})
        widest = std::max(widest, q->bits);
    const uint64_t product = std::max({products.rRh, products.old_contrib, products.new_contrib});
    const uint64_t sums =
        std::max(accumulator_bound(n.W, n.x.inner()), accumulator_bound(n.R, n.h));
    // One-term sums of any tier are exact in float64: it rounds v * M once if |v| < 2^53.
    plan.narrow = widest <= kNarrowBits && none_e && sums < power(52) && product < power(53);
    // float32 is exact for two-term sums of tier a, products below 2^24 and 24-bit multipliers.
    plan.float32 = plan.narrow && all_a && product < power(24) &&
                   n.W.weight_bits + n.x.bits <= 16 && n.R.weight_bits + n.h.bits <= 16;
    plan.product = static_cast<double>(product);
}

// Products are multiples of 2^-k, so that a quarter of 2^-k moves nothing but ties.
void shift_ties(Requantizer &r) {
    const double little = std::min(std::ldexp(1, -r.k - 2), 0.25);
    switch (r.rule) {
        case QG_HALF_EVEN:
            return;
        case QG_HALF_AWAY:
            r.above = little;
            r.below = -little;
            return;
        case QG_DOUBLE: {
            // the first step moves what would be a tie of the second one away from 0
            const double moved =
                r.k > kMultiplierBits ? std::ldexp(1, kMultiplierBits - 1 - r.k) : 0;
            r.above = little + moved;
            r.below = little - moved;
            return;
        }
        default:
            r.above = r.below = r.rule == QG_FLOOR ? little - 0.5 : little;
    }
}

}  // namespace

Container QuantizerNumbers::container() const {
    if (is_signed) return bits <= 8 ? Container::i8 : bits <= 16 ? Container::i16 : Container::i32;
    return bits <= 7    ? Container::i8
           : bits <= 8  ? Container::u8
           : bits <= 15 ? Container::i16
           : bits <= 31 ? Container::i32
                        : Container::i64;
}

int tier_of(const SumNumbers &sum, const uint64_t (&V)[2]) {
    uint64_t total = total_of(sum, V);
    if (total < power(24)) return 'a';
    total = saturated_sum(total, power(sum.k - 1));
    return total < power(31) ? 'b' : total < power(53) ? 'c' : total < power(62) ? 'd' : 'e';
}

Quantizer quantizer_of(const QuantizerNumbers &n, int rule) {
    Quantizer q;
    q.rule = rule;
    q.scale = n.scale;
    q.zero = static_cast<int32_t>(n.zero);
    q.lo = static_cast<int32_t>(n.lo() - n.zero);
    q.hi = static_cast<int32_t>(n.hi() - n.zero);
    q.container = n.container();
    return q;
}

LayerPlan layer_plan(const CellNumbers &n) {
    const Products products = products_of(n);
    const uint64_t Wx = reach_of(n.Wx), Rh = reach_of(n.Rh), h = reach_of(n.h);
    auto bound_of = [](const QuantizerNumbers &q, uint64_t product) {
        return q.present() ? reach_of(q) : product;
    };
    const uint64_t rRh = bound_of(n.rRh, products.rRh);
    const uint64_t old_contrib = bound_of(n.old_contrib, products.old_contrib);
    const uint64_t new_contrib = bound_of(n.new_contrib, products.new_contrib);
    LayerPlan plan;
    Cell &cell = plan.cell;
    cell.H = n.H;
    cell.x = quantizer_of(n.x, n.rounding_input);
    cell.h = quantizer_of(n.h, n.rounding_input);
    cell.one = n.one;
    cell.rule = n.rounding;
    auto of_two = [&](const SumNumbers &sum, const QuantizerNumbers &out, uint64_t a, uint64_t b) {
        return sum_of(sum, out, tier_of(sum, {a, b}), total_of(sum, {a, b}), n.rounding);
    };
    cell.z_pre = of_two(n.sums.z_pre, n.z_pre, Wx, Rh);
    cell.r_pre = of_two(n.sums.r_pre, n.r_pre, Wx, Rh);
    cell.g_pre = of_two(n.sums.g_pre, n.g_pre, Wx, rRh);
    cell.h_new = of_two(n.sums.h, n.h, old_contrib, new_contrib);
    cell.zoneout = of_two(n.sums.zoneout, n.h, h, h);
    cell.rRh = product_sum(n.sums.rRh, n.rRh, n.r.bits + n.Rh.bits, products.rRh, n.rounding);
    cell.old_contrib = product_sum(n.sums.old_contrib, n.old_contrib, n.z.bits + n.h.bits,
                                   products.old_contrib, n.rounding);
    cell.new_contrib = product_sum(n.sums.new_contrib, n.new_contrib, n.z.bits + n.g.bits,
                                   products.new_contrib, n.rounding);
    cell.z = table_of(n.tables.z, n.z_pre, n.rounding);
    cell.r = table_of(n.tables.r, n.r_pre, n.rounding);
    cell.g = table_of(n.tables.g, n.g_pre, n.rounding);
    plan.W = matrix_of(n.W, n.x, n.Wx, n.rounding);
    plan.R = matrix_of(n.R, n.h, n.Rh, n.rounding);
    find_exactness(n, products, plan);
    return plan;
}

Requantizer requantizer(const SumNumbers &sum, const QuantizerNumbers &below,
                        const QuantizerNumbers &above, int rule) {
    Requantizer r;
    r.rule = rule;
    r.m = std::ldexp(static_cast<double>(sum.M[0]), static_cast<int>(-sum.k));
    r.M = sum.M[0];
    r.k = static_cast<int>(sum.k);
    r.narrow = std::max(below.bits, above.bits) <= kNarrowBits;
    shift_ties(r);
    r.lo = static_cast<double>(above.lo() - above.zero);
    r.hi = static_cast<double>(above.hi() - above.zero);
    r.from_zero = below.zero;
    r.to_zero = above.zero;
    r.from = below.container();
    r.to = above.container();
    return r;
}

}  // namespace quant_gru
