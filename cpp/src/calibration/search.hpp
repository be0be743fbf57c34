// Quantizers from statistics: cover a range, or minimize the squared error.
#pragma once

#include <optional>

#include "calibration/histogram.hpp"
#include "cpu/calibration/effects.hpp"
#include "quant_gru/parameters.hpp"

namespace quant_gru {

// The codes of an operator, the range of values that they must represent, and the smallest scale
// that covers it; 1 if the range is only 0.
Codes codes_of(double minimum, double maximum, const OperatorConfig &config, ScaleKind kind);

// The quantizer with the smallest scale that clips neither minimum, maximum nor 0.
ActivationQuantizer covering_quantizer(double minimum, double maximum, const OperatorConfig &config,
                                       ScaleKind kind);

// The candidate around the covering scale with the least squared error.
ActivationQuantizer least_squares_quantizer(const Histogram &histogram,
                                            const OperatorConfig &config, ScaleKind kind);

// The quantizer of a range that excludes 0: over the candidates around the covering scale, the one
// with the least squared error; without a histogram, the smallest scale that clips nothing. Empty
// if the range includes 0, is a single value, or is too narrow for its distance to 0.
std::optional<ActivationQuantizer> far_quantizer(double minimum, double maximum,
                                                 const Histogram *histogram,
                                                 const OperatorConfig &config, ScaleKind kind);

}  // namespace quant_gru
