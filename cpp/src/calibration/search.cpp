// The rules of calibration/covering.py, calibration/search.py and calibration/far_range.py.
#include "calibration/search.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "number_rules.hpp"

namespace quant_gru {
namespace {

constexpr int kLeastExponent = -126, kMostExponent = 127;
constexpr uint32_t kLeastBits = 0x00800000, kMostBits = 0x7F000000;
constexpr double kLeastScale = 0x1p-126, kMostScale = 0x1p127;
constexpr int kCoarser = 1, kFiner = 16, kPerOctave = 16, kOctavesFiner = 12;
constexpr double kTie = 1e-9;

double as_float32(double value) { return static_cast<double>(static_cast<float>(value)); }

// rint(v / s) with a float32 division
double rounded_quotient(double v, double s) {
    return std::rint(static_cast<double>(static_cast<float>(v) / static_cast<float>(s)));
}

double from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return static_cast<double>(value);
}

// The codes of an operator, and the range of values that they must represent, 0 included.
struct Problem {
    Problem(double minimum, double maximum, const OperatorConfig &config, ScaleKind kind)
        : codes{config.bitwidth, !config.is_unsigned, 1.0, 0},
          symmetric(config.is_symmetric),
          kind(kind),
          lo(static_cast<double>(codes.lo())),
          hi(static_cast<double>(codes.hi())),
          low(symmetric && lo == 0 ? 0.0 : as_float32(std::min(0.0, minimum))),
          high(symmetric && hi == 0 ? 0.0 : as_float32(std::max(0.0, maximum))) {}

    bool covers(double scale) const {
        const double first = rounded_quotient(low, scale), last = rounded_quotient(high, scale);
        return symmetric ? lo <= first && last <= hi : last - first <= hi - lo;
    }

    // The smallest scale that covers the range.
    double covering_scale() const {
        if (kind == ScaleKind::pot) {
            int least = kLeastExponent, most = kMostExponent + 1;
            while (least < most) {
                const int middle = least + (most - least) / 2;
                if (covers(std::ldexp(1.0, middle)))
                    most = middle;
                else
                    least = middle + 1;
            }
            return std::ldexp(1.0, std::min(least, kMostExponent));
        }
        uint32_t least = kLeastBits, most = kMostBits + 1;
        while (least < most) {
            const uint32_t middle = least + (most - least) / 2;
            if (covers(from_bits(middle)))
                most = middle;
            else
                least = middle + 1;
        }
        return std::min(kMostScale, std::max(kLeastScale, from_bits(least)));
    }

    ActivationQuantizer quantizer(double scale, double zero) const {
        ActivationQuantizer q = codes;
        q.scale = scale;
        q.zero_point = static_cast<int64_t>(std::min(hi, std::max(lo, zero)));
        return q;
    }

    ActivationQuantizer codes;
    bool symmetric;
    ScaleKind kind;
    double lo, hi, low, high;
};

struct Candidate {
    double scale, zero;
    bool clips;
    int order;
};

// Zero points fit the low end, fit the high end, or center the range, in order of preference.
std::vector<Candidate> candidates_of(const Problem &p, std::vector<double> scales) {
    for (double &scale : scales)
        scale = as_float32(std::min(kMostScale, std::max(kLeastScale, scale)));
    std::sort(scales.begin(), scales.end());
    scales.erase(std::unique(scales.begin(), scales.end()), scales.end());
    std::vector<Candidate> found;
    for (double scale : scales) {
        const double first = rounded_quotient(p.low, scale), last = rounded_quotient(p.high, scale);
        const double fit_low = p.lo - first, fit_high = p.hi - last;
        const double center = std::rint((p.lo + p.hi) / 2 - (p.low + p.high) / (2 * scale));
        std::vector<double> zeros = {center, fit_low, fit_high};
        if (p.high == 0) zeros = {fit_high, fit_low, center};
        if (p.low == 0) zeros = {fit_low, fit_high, center};
        if (p.symmetric) zeros = {0.0};
        for (size_t i = 0; i < zeros.size(); ++i) {
            const double zero = std::min(p.hi, std::max(p.lo, zeros[i]));
            found.push_back(
                {scale, zero, first < p.lo - zero || last > p.hi - zero, static_cast<int>(i)});
        }
    }
    return found;
}

// The summed squared error of a candidate. Values are assumed to be uniform inside a bin. With
// u = v / s, r = clamp(rint(u)) and d = u - r, d^2 has the antiderivative r / 12 + d^3 / 3.
double squared_error(const Bins &bins, const Problem &p, const Candidate &c) {
    const double lo = p.lo - c.zero, hi = p.hi - c.zero, s = c.scale;
    double integral = 0, points = 0, r = 0, cube = 0;
    for (size_t i = 0; i < bins.edges.size(); ++i) {
        const double u = bins.edges[i] / s;
        const double next = std::min(std::max(std::rint(u), lo), hi), d = u - next;
        const double next_cube = d * d * d;
        if (i > 0 && bins.counts[i - 1]) {
            const double width = bins.edges[i] - bins.edges[i - 1];
            const auto count = static_cast<double>(bins.counts[i - 1]);
            if (width > 0)
                integral += ((next - r) / 12 + (next_cube - cube) / 3) * (count / width);
            else
                points += d * d * count;
        }
        r = next;
        cube = next_cube;
    }
    return s * s * s * integral + s * s * points;
}

Candidate best(const Bins &bins, const Problem &p, const std::vector<double> &scales) {
    const std::vector<Candidate> candidates = candidates_of(p, scales);
    std::vector<double> errors;
    for (const Candidate &each : candidates) errors.push_back(squared_error(bins, p, each));
    const double most = *std::min_element(errors.begin(), errors.end()) * (1 + kTie);
    const Candidate *winner = nullptr;
    const auto rank = [](const Candidate &c) { return std::tuple(c.clips, c.scale, c.order); };
    for (size_t i = 0; i < candidates.size(); ++i)
        if (errors[i] <= most && (!winner || rank(candidates[i]) < rank(*winner)))
            winner = &candidates[i];
    return *winner;
}

// Zero points that center the range, fit its low end or its high end, and are near enough.
void add_far(const Problem &p, double scale, std::vector<Candidate> &found) {
    if (!(scale >= kLeastScale && scale <= kMostScale)) return;
    const double fit_low = p.lo - rounded_quotient(p.low, scale);
    const double fit_high = p.hi - rounded_quotient(p.high, scale);
    std::vector<double> zeros;
    for (double zero : {std::floor((fit_low + fit_high) / 2), fit_low, fit_high})
        if (std::find(zeros.begin(), zeros.end(), zero) == zeros.end()) zeros.push_back(zero);
    for (double zero : zeros)
        if (std::max(std::fabs(p.lo - zero), std::fabs(p.hi - zero)) <= kFarthest)
            found.push_back({scale, zero, false, 0});
}

}  // namespace

Codes codes_of(double minimum, double maximum, const OperatorConfig &config, ScaleKind kind) {
    const Problem p(minimum, maximum, config, kind);
    const double covering = p.low == p.high ? 1 : p.covering_scale();
    return {p.lo, p.hi, p.symmetric, kind == ScaleKind::free, p.low, p.high, covering};
}

ActivationQuantizer covering_quantizer(double minimum, double maximum, const OperatorConfig &config,
                                       ScaleKind kind) {
    const Problem p(minimum, maximum, config, kind);
    if (p.low == p.high) return p.codes;
    const double scale = p.covering_scale();
    if (p.symmetric) return p.quantizer(scale, 0);
    const double fit_low = p.lo - rounded_quotient(p.low, scale);
    const double fit_high = p.hi - rounded_quotient(p.high, scale);
    const double middle = std::floor((fit_low + fit_high) / 2);
    return p.quantizer(scale, p.low == 0 ? fit_low : p.high == 0 ? fit_high : middle);
}

ActivationQuantizer least_squares_quantizer(const Histogram &histogram,
                                            const OperatorConfig &config, ScaleKind kind) {
    const Problem p(histogram.minimum, histogram.maximum, config, kind);
    if (p.low == p.high) return p.codes;
    const Bins bins = occupied_bins(histogram);
    const double covering = p.covering_scale();
    int exponent = 0;
    std::frexp(covering, &exponent);
    --exponent;
    std::vector<double> scales;
    for (int e = std::max(kLeastExponent, exponent - kFiner);
         e <= std::min(kMostExponent, exponent + kCoarser); ++e)
        scales.push_back(std::ldexp(1.0, e));
    if (kind == ScaleKind::pot) {
        const Candidate found = best(bins, p, scales);
        return p.quantizer(found.scale, found.zero);
    }
    const double last_codes =
        std::max(p.lo != 0 ? p.low / p.lo : 0.0, p.hi != 0 ? p.high / p.hi : 0.0);
    scales.push_back(p.symmetric ? last_codes : (p.high - p.low) / (p.hi - p.lo));
    for (int k = -kOctavesFiner * kPerOctave; k <= kPerOctave; ++k)
        scales.push_back(covering * std::pow(2.0, k / static_cast<double>(kPerOctave)));
    const double coarse = best(bins, p, scales).scale;
    scales.clear();
    for (int k = -kPerOctave; k <= kPerOctave; ++k)
        scales.push_back(coarse * std::pow(2.0, k / static_cast<double>(kPerOctave * kPerOctave)));
    const Candidate found = best(bins, p, scales);
    return p.quantizer(found.scale, found.zero);
}

std::optional<ActivationQuantizer> far_quantizer(double minimum, double maximum,
                                                 const Histogram *histogram,
                                                 const OperatorConfig &config, ScaleKind kind) {
    Problem p(minimum, maximum, config, kind);
    p.low = as_float32(minimum);
    p.high = as_float32(maximum);
    if ((p.low <= 0 && p.high >= 0) || p.low == p.high) return {};
    const double covering = p.covering_scale();
    std::vector<double> scales = {covering};
    if (histogram) {
        const int exponent = std::ilogb(covering);
        for (int e = std::max(kLeastExponent, exponent - kFiner);
             e <= std::min(kMostExponent, exponent + kCoarser); ++e)
            scales.push_back(std::ldexp(1.0, e));
        if (kind == ScaleKind::free)
            for (int k = -kOctavesFiner * kPerOctave; k <= kPerOctave; ++k)
                scales.push_back(covering * std::pow(2.0, k / static_cast<double>(kPerOctave)));
    }
    std::vector<Candidate> candidates;
    for (double scale : scales) add_far(p, as_float32(scale), candidates);
    if (candidates.empty()) return {};
    size_t found = 0;
    if (histogram) {
        const Bins bins = occupied_bins(*histogram);
        std::vector<double> errors;
        for (const Candidate &each : candidates) errors.push_back(squared_error(bins, p, each));
        const double most = *std::min_element(errors.begin(), errors.end()) * (1 + kTie);
        while (errors[found] > most) ++found;
    }
    ActivationQuantizer q = p.codes;
    q.scale = candidates[found].scale;
    q.zero_point = static_cast<int64_t>(candidates[found].zero);
    return q;
}

}  // namespace quant_gru
