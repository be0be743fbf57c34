// The mean of a layer's input, for the correction of its bias.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace quant_gru {

class InputMean {
 public:
    // x: (rows, C)
    void update(const double *x, int64_t rows, int64_t C) {
        sums_.resize(static_cast<size_t>(C));
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t k = 0; k < C; ++k) {
                const double value = x[i * C + k];
                sums_[static_cast<size_t>(k)] += value;
                largest_ = std::max(largest_, std::fabs(value));
            }
        count_ += rows;
    }

    // The mean of each feature, rounded half-even to a multiple of 2^(e - 16), where 2^e is larger
    // than the largest magnitude. Empty if there are no values, or all means are 0.
    std::vector<double> mean() const {
        std::vector<double> found;
        if (!count_) return found;
        int exponent = 0;
        std::frexp(static_cast<float>(largest_), &exponent);
        const int unit = std::max(exponent - kBits, kLeastExponent);
        bool any = false;
        for (double sum : sums_) {
            const double rounded =
                std::nearbyint(std::ldexp(sum / static_cast<double>(count_), -unit));
            found.push_back(std::ldexp(rounded, unit));
            any = any || rounded != 0;
        }
        if (!any) found.clear();
        return found;
    }

 private:
    static constexpr int kBits = 16, kLeastExponent = -149;
    std::vector<double> sums_;
    int64_t count_ = 0;
    double largest_ = 0;
};

}  // namespace quant_gru
