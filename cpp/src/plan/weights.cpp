// Codes, scales and plan numbers of weights and biases,
// docs/arithmetic.md#8-scales-of-weights-and-biases.
#include <algorithm>
#include <cmath>
#include <utility>

#include "c99/weight_rows.h"
#include "cpu/core/cell_numbers.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// The scale of a group of weights; 0 if all are zero.
double group_scale(const float *values, int64_t n, int bits, bool free_scale) {
    double least = 0, most = 0;
    for (int64_t i = 0; i < n; ++i) {
        least = std::min(least, static_cast<double>(values[i]));
        most = std::max(most, static_cast<double>(values[i]));
    }
    if (least == 0 && most == 0) return 0;
    const double lo = -std::ldexp(1.0, bits - 1), hi = std::ldexp(1.0, bits - 1) - 1;
    const int exponent = qg_covering(least, most, bits, lo, hi);
    if (!free_scale) {
        double largest = 0, sums[QG_FINER + 1] = {};
        for (int64_t i = 0; i < n; ++i)
            for (int finer = 0; finer <= QG_FINER; ++finer)
                largest = std::max(largest, qg_error(values[i], exponent, finer, lo, hi));
        const double quantum = qg_quantum(largest, n);
        for (int64_t i = 0; i < n; ++i)
            for (int finer = 0; finer <= QG_FINER; ++finer)
                sums[finer] += rint(qg_error(values[i], exponent, finer, lo, hi) * quantum);
        return std::ldexp(1.0, -qg_best(sums, exponent));
    }
    const double covering = qg_free_covering(least, most, hi);
    if (!qg_searches_free(covering, bits, n)) return covering;
    double candidates[QG_FREE], sums[QG_FREE] = {};
    qg_free_candidates(covering, exponent, candidates);
    const double quantum = qg_free_quantum(bits, n);
    for (int c = 0; c < QG_FREE; ++c)
        for (int64_t i = 0; i < n; ++i)
            sums[c] +=
                qg_free_error(values[i], candidates[c], candidates[c] / covering, quantum, lo, hi);
    return qg_free_best(sums, candidates);
}

// The scale of every row (3H), in PyTorch's order.
std::vector<float> row_scales(const CellParameters &cell, Operator op, const float *values,
                              int64_t rows, int64_t columns) {
    const OperatorConfig &config = cell.config[op];
    const int64_t groups = config.granularity == Granularity::tensor ? 1
                           : config.granularity == Granularity::gate ? 3
                                                                     : rows;
    const int64_t height = rows / groups;
    const auto &pinned = cell.pinned[static_cast<size_t>(op) - static_cast<size_t>(Operator::W)];
    std::vector<double> found(pinned);
    if (pinned.empty())
        for (int64_t i = 0; i < groups; ++i)
            found.push_back(group_scale(values + i * height * columns, height * columns,
                                        config.bitwidth,
                                        cell.config.scale_kind == ScaleKind::free));
    const double largest = *std::max_element(found.begin(), found.end());
    std::vector<float> scales;
    for (int64_t row = 0; row < rows; ++row) {
        const double scale = found[static_cast<size_t>(row / height)];
        scales.push_back(!pinned.empty()                          ? static_cast<float>(scale)
                         : op == Operator::W || op == Operator::R ? qg_matrix_scale(scale, largest)
                                                                  : qg_bias_scale(scale, largest));
    }
    return scales;
}

void check_finite(const float *values, int64_t n, Operator op) {
    for (int64_t i = 0; i < n; ++i)
        if (!std::isfinite(values[i]))
            throw ArgumentError("Expected weights to be finite, got " + std::to_string(values[i]) +
                                " (operator '" + name_of(op) + "')");
}

// The bias with the mean error of the weights and the offset of the input,
// docs/arithmetic.md#correction-of-the-input-bias.
class Correction {
 public:
    // mean: empty for a correction by the offset alone.
    Correction(const std::vector<double> &mean, int bits, double offset) : offset_(offset) {
        if (mean.empty()) return;
        double largest = 0;
        for (double m : mean) largest = std::max(largest, std::fabs(m));
        int exponent = 0;
        std::frexp(largest, &exponent);
        const int terms = qg_ceil_log2(static_cast<int64_t>(mean.size()));
        const int resolution = kSumBits - 1 - bits - terms;
        for (double m : mean) factors_.push_back(std::ldexp(m, resolution - exponent));
        limit_ = std::ldexp(1.0, kSumBits - terms);
        exponent_ = exponent - resolution;
    }

    // w, codes: one row of K.
    float operator()(float b, const float *w, const int64_t *codes, int64_t K, float scale) const {
        auto found = static_cast<double>(b);
        if (offset_ != 0) {
            int64_t total = 0;
            for (int64_t i = 0; i < K; ++i) total += codes[i];
            found += static_cast<double>(scale) * offset_ * static_cast<double>(total);
        }
        if (!factors_.empty()) {
            const double row = qg_row_factor(scale);
            double sum = 0;
            for (size_t i = 0; i < factors_.size(); ++i)
                sum += qg_mean_error(w[i], scale, static_cast<double>(codes[i]), row, factors_[i],
                                     limit_);
            found += sum * qg_power(qg_exponent(scale) + exponent_);
        }
        return static_cast<float>(qg_within(found, -QG_LARGEST_FLOAT, QG_LARGEST_FLOAT));
    }

 private:
    static constexpr int kSumBits = 51;
    const double offset_;
    std::vector<double> factors_;
    double limit_ = 0;
    int exponent_ = 0;
};

}  // namespace

WeightCodes weight_codes(const CellParameters &cell, Operator weight, const FloatCell &values,
                         int64_t H, int64_t K) {
    const bool input = weight == Operator::W;
    const Operator bias = input ? Operator::bw : Operator::br;
    const float *w = input ? values.W : values.R, *b = input ? values.bw : values.br;
    const int64_t rows = 3 * H;
    const std::vector<float> zeros(b ? 0 : static_cast<size_t>(rows), 0.f);
    if (!b) b = zeros.data();
    check_finite(w, rows * K, weight);
    check_finite(b, rows, bias);
    const auto scales = row_scales(cell, weight, w, rows, K);
    const double hi = std::ldexp(1.0, cell.config[weight].bitwidth - 1) - 1;
    const double bias_hi = std::ldexp(1.0, cell.config[bias].bitwidth - 1) - 1;
    WeightCodes to;
    to.codes.reserve(static_cast<size_t>(rows * K));
    // rows update, reset, candidate from rows reset, update, candidate
    const auto row_of = [H](int64_t c) { return c < H ? c + H : c < 2 * H ? c - H : c; };
    for (int64_t c = 0; c < rows; ++c) {
        const float *row = w + row_of(c) * K, scale = scales[static_cast<size_t>(row_of(c))];
        for (int64_t i = 0; i < K; ++i) to.codes.push_back(qg_code(row[i], scale, -hi - 1, hi));
        to.scales.push_back(scale);
    }
    std::vector<float> corrected;
    const double offset = input ? cell.quantizer(Operator::x).offset() : 0;
    if (input && (!cell.input_mean.empty() || offset != 0)) {
        const Correction correction(cell.input_mean, cell.config[weight].bitwidth, offset);
        corrected.resize(static_cast<size_t>(rows));
        for (int64_t c = 0; c < rows; ++c) {
            const int64_t row = row_of(c);
            corrected[static_cast<size_t>(row)] = correction(
                b[row], w + row * K, to.codes.data() + c * K, K, scales[static_cast<size_t>(row)]);
        }
        b = corrected.data();
    }
    const auto bias_scales = row_scales(cell, bias, b, rows, 1);
    for (int64_t c = 0; c < rows; ++c) {
        const int64_t row = row_of(c);
        const float bias_scale = bias_scales[static_cast<size_t>(row)];
        to.bias_codes.push_back(qg_code(b[row], bias_scale, -bias_hi - 1, bias_hi));
        to.bias_scales.push_back(bias_scale);
    }
    return to;
}

WeightNumbers weight_numbers(const CellParameters &cell, Operator weight, WeightCodes codes) {
    const bool input = weight == Operator::W;
    const ActivationQuantizer &operand = cell.quantizer(input ? Operator::x : Operator::h);
    const ActivationQuantizer &result = cell.quantizer(input ? Operator::Wx : Operator::Rh);
    const int bits = cell.config[weight].bitwidth;
    WeightNumbers to;
    to.bias_shift = bias_shift(bits, operand.bits);
    const double unit = std::ldexp(1.0, to.bias_shift);
    const auto limit = static_cast<double>(bias_limit(bits, operand.bits));
    for (size_t c = 0; c < codes.scales.size(); ++c) {
        const qg_channel n =
            qg_channel_of(codes.bias_codes[c], codes.bias_scales[c], codes.scales[c], operand.scale,
                          result.scale, unit, limit, significant_bits(bits + operand.bits));
        to.bias.push_back(n.B);
        to.M.push_back(n.M);
        to.k.push_back(n.k);
    }
    to.codes = std::move(codes.codes);
    return to;
}

}  // namespace quant_gru
