#include "cuda/host/plans/saturating.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "cuda/host/plans/gate_tables.hpp"

namespace quant_gru::cuda {
namespace {

constexpr double kRounding = 49152, kCodes = kFractionCodes;
constexpr double kExact = 16777216;  // float32 represents multiples of a unit up to this one
constexpr double kMore = 1 + 1.0 / 262144, kMoved = 131072;  // see `more_than`

double low_of(const QuantizerNumbers &q) { return static_cast<double>(q.lo() - q.zero); }
double reach_of(const QuantizerNumbers &q) { return static_cast<double>(q.reach()); }

// Multipliers as powers of two. Everything below is a sum of few such products, so float64 either
// holds it exactly, or it is so large that the check fails.
struct Powers {
    double m[2] = {0, 0};
    bool hold = true;

    explicit Powers(const SumNumbers &sum) {
        for (int i = 0; i < sum.terms; ++i) {
            m[i] = std::ldexp(static_cast<double>(sum.M[i]), static_cast<int>(-sum.k));
            hold = hold && sum.M[i] > 0 && (sum.M[i] & (sum.M[i] - 1)) == 0 &&
                   std::ldexp(1.0, -60) < m[i] && m[i] < std::ldexp(1.0, 60);
        }
    }
};

LimitsC limits_of(const QuantizerNumbers &q) {
    if (!q.present()) return {};
    const double lo = low_of(q), range = static_cast<double>(q.hi() - q.lo());
    return {static_cast<float>(-kRounding - lo / kCodes), static_cast<float>(range / kCodes)};
}

class Builder {
 public:
    explicit Builder(const CellNumbers &numbers)
        : n_(numbers), half_(n_.rounding == QG_HALF_UP || n_.rounding == QG_HALF_AWAY ? 0.5 : 0) {}

    std::optional<SaturatedC> built() {
        for (const SumNumbers *sum : {&n_.sums.z_pre, &n_.sums.r_pre, &n_.sums.g_pre, &n_.sums.rRh,
                                      &n_.sums.old_contrib, &n_.sums.new_contrib, &n_.sums.h})
            if (!Powers(*sum).hold) return std::nullopt;
        for (const QuantizerNumbers *q :
             {&n_.Rh, &n_.z_pre, &n_.r_pre, &n_.g_pre, &n_.rRh, &n_.old_contrib, &n_.new_contrib})
            if (q->present() && q->hi() - q->lo() >= kFractionCodes) return std::nullopt;
        if (n_.rRh.present()) check_moved(reach_of(n_.r) * reach_of(n_.Rh));
        c_.Rh = limits_of(n_.Rh);
        c_.rRh = limits_of(n_.rRh);
        c_.old_contrib = limits_of(n_.old_contrib);
        c_.new_contrib = limits_of(n_.new_contrib);
        const double Rh = low_of(n_.Rh);
        c_.z = before(n_.sums.z_pre, n_.z_pre, Rh);
        c_.r = before(n_.sums.r_pre, n_.r_pre, Rh);
        // an unrounded product has no fraction
        c_.g = before(n_.sums.g_pre, n_.g_pre, n_.rRh.present() ? low_of(n_.rRh) : 0);
        // the factor of the reset gate
        const double rest =
            n_.rRh.present() ? Powers(n_.sums.rRh).m[0] : Powers(n_.sums.g_pre).m[1];
        c_.rest = static_cast<float>(rest);
        c_.rest_offset = static_cast<float>(rest * Rh / kCodes);
        add_state();
        return exact_ ? std::optional(c_) : std::nullopt;
    }

 private:
    void check(double unit, std::initializer_list<double> largest) {
        double total = kCodes;
        for (const double each : largest) total += std::fabs(each);
        exact_ = exact_ && total / unit <= kExact;
    }

    void check_moved(double product) { exact_ = exact_ && (!away_ || product < kMoved); }

    // `lo`: the code whose fraction is 0 in the late term.
    BeforeC before(const SumNumbers &sum, const QuantizerNumbers &pre, double lo) {
        const auto [early, late] = Powers(sum).m;
        const auto entry = static_cast<double>(first_entry(pre));
        check(std::min({early, late, half_ ? half_ : 1.0}),
              {early * reach_of(n_.Wx), late * lo, entry, half_});
        return {static_cast<float>(early / kCodes), static_cast<float>(late),
                static_cast<float>((late * lo - entry + half_) / kCodes)};
    }

    void add_state() {
        const auto [to_old, to_new] = Powers(n_.sums.h).m;
        const auto left =
            static_cast<double>(std::max(std::llabs(n_.one - (n_.z.lo() - n_.z.zero)),
                                         std::llabs(n_.one - (n_.z.hi() - n_.z.zero))));
        double offset = 0, largest = 0;
        // one part of the new state; returns the multiplier of its factor
        const auto part = [&](const QuantizerNumbers &q, const SumNumbers &sum, double m,
                              double product) {
            largest += m * (q.present() ? reach_of(q) : product);
            if (!q.present()) return static_cast<float>(m);
            offset += m * low_of(q);
            check_moved(product);
            return static_cast<float>(Powers(sum).m[0] / kCodes * (away_ ? kMore : 1));
        };
        c_.of_z =
            part(n_.old_contrib, n_.sums.old_contrib, to_old, reach_of(n_.z) * reach_of(n_.h));
        c_.of_left = part(n_.new_contrib, n_.sums.new_contrib, to_new, left * reach_of(n_.g));
        c_.h_old = static_cast<float>(to_old * kCodes);
        c_.h_new = static_cast<float>(to_new * kCodes);
        // a half that is added, or one bit more, see `next_state`
        const double half = away_ ? 0 : half_;
        c_.h_offset = static_cast<float>(offset + half);
        check(std::min({to_old, to_new, half ? half : to_old}) / (away_ ? 2 : 1),
              {largest, offset, half});
    }

    const CellNumbers &n_;
    const double half_;  // of a code, that the rule adds
    const bool away_ = n_.rounding == QG_HALF_AWAY;
    SaturatedC c_{};
    bool exact_ = true;
};

}  // namespace

std::optional<SaturatedC> saturated_numbers(const CellNumbers &numbers) {
    return Builder(numbers).built();
}

}  // namespace quant_gru::cuda
