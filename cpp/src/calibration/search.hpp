// Quantizers from statistics: cover a range, or minimize the squared error.
#pragma once

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

}  // namespace quant_gru
