// Inputs or states times a weight matrix, plus its bias.
#pragma once

#include <cstdint>
#include <vector>

#include "passes/gemm.hpp"

namespace quant_gru {

// W or R of a HasteCell (K, 3H). The bias must live as long.
class FloatProjection {
 public:
    FloatProjection(const std::vector<double> &weights, const std::vector<double> &bias, int64_t K,
                    int64_t H)
        : bias_(bias), K_(K), width_(3 * H) {
        matrix_.resize(K, width_);
        matrix_.pack(weights.data(), 0, 1);
    }

    // `to` becomes the products (rows, 3H).
    void multiply(const double *from, int64_t rows, std::vector<double> &to) const {
        to.resize(static_cast<size_t>(rows * width_));
        matrix_.multiply({from, K_, 1}, 0, rows, to.data(), false);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < width_; ++c)
                to[static_cast<size_t>(i * width_ + c)] += bias_[static_cast<size_t>(c)];
    }

 private:
    const std::vector<double> &bias_;
    int64_t K_, width_;
    PackedMatrix<double> matrix_;
};

}  // namespace quant_gru
