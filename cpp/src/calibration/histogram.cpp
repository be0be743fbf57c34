#include "calibration/histogram.hpp"

#include <algorithm>
#include <cmath>

namespace quant_gru {
namespace {

constexpr int64_t kMostBins = 2048;
constexpr int kLeastExponent = -126;

int64_t bin_of(double value, int exponent) {
    return static_cast<int64_t>(std::floor(std::ldexp(value, -exponent)));
}

// An empty histogram for values with these extremes.
Histogram window(double minimum, double maximum) {
    const double low = std::min(0.0, minimum), high = std::max(0.0, maximum);
    Histogram to;
    to.exponent = kLeastExponent;
    to.minimum = minimum;
    to.maximum = maximum;
    if (high > low) {
        int exponent = 0;
        std::frexp(high - low, &exponent);
        to.exponent = std::max(to.exponent, exponent - 13);
    }
    while (bin_of(high, to.exponent) - bin_of(low, to.exponent) >= kMostBins) ++to.exponent;
    to.first = bin_of(low, to.exponent);
    to.counts.assign(static_cast<size_t>(bin_of(high, to.exponent) - to.first + 1), 0);
    return to;
}

void add(const Histogram &part, Histogram &to) {
    const int shift = std::min(to.exponent - part.exponent, 62);
    for (size_t i = 0; i < part.counts.size(); ++i) {
        const int64_t bin = (part.first + static_cast<int64_t>(i)) >> shift;
        to.counts[static_cast<size_t>(bin - to.first)] += part.counts[i];
    }
}

double value_at_rank(const std::vector<double> &edges, const std::vector<int64_t> &counts,
                     double rank) {
    double cumulative = 0;
    size_t i = 0;
    for (; i < counts.size(); ++i) {
        const double next = cumulative + static_cast<double>(counts[i]);
        if (next > rank) break;
        cumulative = next;
    }
    const double inside = rank - cumulative;
    return edges[i] + (edges[i + 1] - edges[i]) * (inside / static_cast<double>(counts[i]));
}

}  // namespace

Histogram histogram_of(const float *values, int64_t count, double minimum, double maximum) {
    Histogram to = window(minimum, maximum);
    const double factor = std::ldexp(1.0, -to.exponent);
    for (int64_t i = 0; i < count; ++i) {
        const auto bin = static_cast<int64_t>(std::floor(static_cast<double>(values[i]) * factor));
        ++to.counts[static_cast<size_t>(bin - to.first)];
    }
    return to;
}

Histogram merged(const Histogram &a, const Histogram &b) {
    Histogram to = window(std::min(a.minimum, b.minimum), std::max(a.maximum, b.maximum));
    add(a, to);
    add(b, to);
    return to;
}

Bins occupied_bins(const Histogram &histogram) {
    const double width = std::ldexp(1.0, histogram.exponent);
    const int64_t begin = bin_of(histogram.minimum, histogram.exponent);
    const int64_t end = bin_of(histogram.maximum, histogram.exponent) + 1;
    Bins found;
    for (int64_t k = begin; k <= end; ++k)
        found.edges.push_back(std::min(std::max(static_cast<double>(k) * width, histogram.minimum),
                                       histogram.maximum));
    const auto from = histogram.counts.begin();
    found.counts.assign(from + (begin - histogram.first), from + (end - histogram.first));
    return found;
}

std::pair<double, double> central_range(const Histogram &histogram, double percent) {
    Bins bins = occupied_bins(histogram);
    int64_t total = 0;
    for (int64_t count : bins.counts) total += count;
    const double tail = (100.0 - percent) / 200.0 * static_cast<double>(total);
    const double low = value_at_rank(bins.edges, bins.counts, tail);
    std::reverse(bins.edges.begin(), bins.edges.end());
    std::reverse(bins.counts.begin(), bins.counts.end());
    for (double &edge : bins.edges) edge = -edge;
    return {low, std::max(low, -value_at_rank(bins.edges, bins.counts, tail))};
}

}  // namespace quant_gru
