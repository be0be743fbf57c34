#include "number_rules.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "c99/fixed_point.h"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kLargestShift = 600;
constexpr int64_t kLargestSum = int64_t{1} << 62;

[[noreturn]] void fail(const std::string &name, const std::string &rule) {
    throw FileError("Expected " + name + " to " + rule);
}

std::string range(int64_t least, int64_t most) {
    return "[" + std::to_string(least) + ", " + std::to_string(most) + "]";
}

// a * b + c for values that are not negative; kLargestSum if that is larger.
int64_t saturated(int64_t a, int64_t b, int64_t c = 0) {
    int64_t found;
    if (__builtin_mul_overflow(a, b, &found) || __builtin_add_overflow(found, c, &found))
        return kLargestSum;
    return std::min(found, kLargestSum);
}

// The largest |term| of a sum, if it fits 64 bits.
struct Bound {
    uint64_t value = 0;
    bool fits = true;

    Bound(int64_t code) : value(static_cast<uint64_t>(code)) {}
    // Of a product, which is fused unless it has a code of its own.
    Bound(const QuantizerNumbers &product, int64_t a, int64_t b) {
        if (product.present())
            value = static_cast<uint64_t>(product.reach());
        else
            fits =
                !__builtin_mul_overflow(static_cast<uint64_t>(a), static_cast<uint64_t>(b), &value);
    }
};

// Whether M[0] V0 + M[1] V1 is below 2^127.
bool fits_words(const SumNumbers &sum, Bound V0, Bound V1) {
    auto term = [](int64_t M, uint64_t V) {
        return qg_wide_times_word({0, V}, static_cast<uint64_t>(M));
    };
    return V0.fits && V1.fits &&
           qg_wide_add(term(sum.M[0], V0.value), term(sum.M[1], V1.value)).hi >= 0;
}

}  // namespace

QuantizerNumbers checked_quantizer(int64_t lo, int64_t hi, int64_t zero, float scale,
                                   const std::string &name, bool far) {
    QuantizerNumbers q;
    q.is_signed = lo < 0;
    for (q.bits = 1; q.bits <= 32; ++q.bits)
        if (q.lo() == lo && q.hi() == hi) break;
    if (q.bits > 32) fail(name, "have the limits of 1 to 32 bits, got " + range(lo, hi));
    if (far && (zero < hi - kFarthest || zero > lo + kFarthest) && (zero < lo || zero > hi))
        fail(name, "have a zero point within " + std::to_string(kFarthest) + " of all codes, got " +
                       std::to_string(zero));
    if (!far && (zero < lo || zero > hi))
        fail(name, "have a zero point in " + range(lo, hi) + ", got " + std::to_string(zero));
    if (!(scale >= 0x1p-126f && scale <= 0x1p127f))
        fail(name, "have a normal scale, got " + std::to_string(scale));
    q.zero = zero;
    q.scale = scale;
    return q;
}

void check_range(const std::vector<int64_t> &values, int64_t least, int64_t most,
                 const std::string &name) {
    for (int64_t each : values)
        if (each < least || each > most)
            fail(name,
                 "contain integers in " + range(least, most) + ", got " + std::to_string(each));
}

void check_table(const TableNumbers &t, const QuantizerNumbers &pre, const QuantizerNumbers &out,
                 const std::string &name) {
    if (t.shift < 0 || t.shift > 62) fail(name, "have a shift in [0, 62]");
    if (t.zero != out.zero || t.lo < out.lo() || t.lo > t.hi || t.hi > out.hi())
        fail(name, "have outputs in " + range(out.lo(), out.hi()) + " with the zero point " +
                       std::to_string(out.zero));
    const int64_t last_bound = t.bounds[t.segments - 1];
    if (t.bounds[0] < pre.lo() || t.last > pre.hi() || last_bound > t.last)
        fail(name, "have inputs in " + range(pre.lo(), pre.hi()));
    if (std::adjacent_find(t.bounds, t.bounds + t.segments, std::greater_equal<>()) !=
        t.bounds + t.segments)
        fail(name, "have ascending bounds");
    for (int64_t i = 0; i < t.segments; ++i) {
        const int64_t end = i + 1 == t.segments ? t.last + 1 : t.bounds[i + 1];
        const int64_t length = end - t.bounds[i];
        int64_t size = 0;  // by Horner's rule, of magnitudes
        for (int power = t.degree; power >= 0; --power) {
            const int64_t c = t.coefficients[i * (t.degree + 1) + power];
            if (c <= -kLargestSum) fail(name, "have sums below 2^62");
            size = saturated(size, length, c < 0 ? -c : c);
        }
        if (size >= kLargestSum) fail(name, "have sums below 2^62");
    }
    if (t.segment_shift < -1 || t.segment_shift > 32)
        fail(name, "have a segment_shift in [-1, 32], got " + std::to_string(t.segment_shift));
    if (t.segment_shift < 0) return;
    const int64_t length = int64_t{1} << t.segment_shift;
    bool even = t.last - last_bound < length;
    for (int64_t i = 1; i < t.segments; ++i) even = even && t.bounds[i] - t.bounds[i - 1] == length;
    if (!even) fail(name, "have segments of 2^" + std::to_string(t.segment_shift) + " codes");
}

void check_sum(const SumNumbers &sum, const std::string &name) {
    const int64_t most = sum.terms == 1 ? int64_t{1} << 24 : INT64_MAX;
    for (int i = 0; i < sum.terms; ++i)
        if (sum.M[i] < 0 || sum.M[i] > most)
            fail(name,
                 "have multipliers in " + range(0, most) + ", got " + std::to_string(sum.M[i]));
    if (sum.k < -kLargestShift || sum.k > kLargestShift)
        fail(name, "have a shift in " + range(-kLargestShift, kLargestShift) + ", got " +
                       std::to_string(sum.k));
}

void check_sums(const CellNumbers &n, const std::string &name) {
    const int64_t one_minus = n.one + std::max(n.z.hi() - n.z.zero, n.z.zero - n.z.lo());
    const Bound rRh(n.rRh, n.r.reach(), n.Rh.reach());
    const Bound old_contrib(n.old_contrib, n.z.reach(), n.h.reach());
    const Bound new_contrib(n.new_contrib, one_minus, n.g.reach());
    if (!fits_words(n.sums.z_pre, n.Wx.reach(), n.Rh.reach()) ||
        !fits_words(n.sums.r_pre, n.Wx.reach(), n.Rh.reach()) ||
        !fits_words(n.sums.g_pre, n.Wx.reach(), rRh) ||
        !fits_words(n.sums.h, old_contrib, new_contrib) ||
        !fits_words(n.sums.zoneout, n.h.reach(), n.h.reach()))
        fail("the sums of " + name, "fit 128 bits");
    for (const auto &[matrix, reach] :
         {std::pair(&n.W, n.x.inner().reach()), std::pair(&n.R, n.h.reach())})
        if (matrix->inputs > most_inputs(matrix->weight_bits, reach))
            fail("the accumulators of " + name, "fit 64 bits");
}

int64_t most_inputs(int weight_bits, int64_t reach) {
    return (INT64_MAX >> (weight_bits - 1)) / std::min<int64_t>(reach, int64_t{1} << 16);
}

}  // namespace quant_gru
