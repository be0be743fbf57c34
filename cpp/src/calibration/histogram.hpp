// Histograms whose state depends only on the values, not on their order of arrival: the rules of
// calibration/histogram.py.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace quant_gru {

// Counts of values in bins [k * 2^exponent, (k + 1) * 2^exponent), from bin `first` on.
struct Histogram {
    int exponent = 0;
    int64_t first = 0;
    std::vector<int64_t> counts;
    double minimum = 0, maximum = 0;  // of the values, exact
};

// The histogram of finite values, given their extremes.
Histogram histogram_of(const float *values, int64_t count, double minimum, double maximum);

Histogram merged(const Histogram &a, const Histogram &b);

// The bins between the extremes. The outer edges are the extremes.
struct Bins {
    std::vector<double> edges;    // (n + 1)
    std::vector<int64_t> counts;  // (n)
};
Bins occupied_bins(const Histogram &histogram);

// The range without (100 - percent) / 2 percent on each side.
std::pair<double, double> central_range(const Histogram &histogram, double percent);

}  // namespace quant_gru
