#include "parameters/operator_rules.hpp"

#include <algorithm>
#include <cmath>

#include "json_writer.hpp"
#include "number_rules.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr double kLeastScale = 0x1p-126, kMostScale = 0x1p127;

void check_scale(double scale, ScaleKind kind) {
    if (!(scale >= kLeastScale && scale <= kMostScale) ||
        static_cast<double>(static_cast<float>(scale)) != scale)
        throw FileError("Expected scale to be a normal positive float32 number, got " +
                        shortest(scale));
    if (kind == ScaleKind::pot && !is_power_of_two(scale))
        throw FileError("Expected scale to be a power of two (scale_kind 'pot'), got " +
                        shortest(scale));
}

}  // namespace

bool is_power_of_two(double value) {
    int exponent = 0;
    return std::frexp(value, &exponent) == 0.5;
}

void set_quantizer(CellParameters &cell, Operator op, double scale, int64_t zero_point, bool far) {
    const OperatorConfig &config = cell.config[op];
    ActivationQuantizer &q = cell.quantizers[static_cast<size_t>(op)];
    q.bits = config.bitwidth;
    q.is_signed = !config.is_unsigned;
    check_scale(scale, cell.config.scale_kind);
    // 1 must be a code
    if (is_sigmoid(op)) scale = 1.0 / std::max(std::rint(1.0 / scale), 1.0);
    q.scale = static_cast<double>(static_cast<float>(scale));
    const bool is_code = zero_point >= q.lo() && zero_point <= q.hi();
    if (far && !is_code && (zero_point < q.hi() - kFarthest || zero_point > q.lo() + kFarthest))
        throw FileError("Expected zero_point to be within " + std::to_string(kFarthest) +
                        " of all codes, got " + std::to_string(zero_point));
    if (!far && !is_code)
        throw FileError("Expected zero_point to be in [" + std::to_string(q.lo()) + ", " +
                        std::to_string(q.hi()) + "], got " + std::to_string(zero_point));
    if (config.is_symmetric && zero_point)
        throw FileError("Expected zero_point to be 0 (symmetric), got " +
                        std::to_string(zero_point));
    q.zero_point = zero_point;
}

void set_pinned(CellParameters &cell, Operator op, std::vector<double> scales, int64_t H) {
    const Granularity granularity = cell.config[op].granularity;
    const int64_t expected = granularity == Granularity::tensor ? 1
                             : granularity == Granularity::gate ? 3
                                                                : 3 * H;
    if (static_cast<int64_t>(scales.size()) != expected)
        throw FileError("Expected " + std::to_string(expected) + " scales, got " +
                        std::to_string(scales.size()));
    for (double scale : scales) check_scale(scale, cell.config.scale_kind);
    cell.pinned[static_cast<size_t>(op) - static_cast<size_t>(Operator::W)] = std::move(scales);
}

}  // namespace quant_gru
