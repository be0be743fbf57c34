// Sigmoid and tanh as piecewise polynomials with integer coefficients.
#pragma once

#include <functional>
#include <vector>

#include "quant_gru/parameters.hpp"

namespace quant_gru {

// The table of an output of sigmoid or tanh, from the codes of its input to its own. segments: at
// most so many for pwl (0 for 16) and quadratic (0 for 8). rounding: the rule of who reads it.
// Throws ArgumentError if coefficients do not fit 64 bits.
ActivationTable build_table(Operator op, const ActivationQuantizer &pre,
                            const ActivationQuantizer &out, Activation activation, int segments,
                            Rounding rounding);

// The yardstick: clamp(rint(f(s_in * (q - zp_in)) / s_out) + zp_out, lo, hi) in float64.
int64_t float_table(Operator op, const ActivationQuantizer &pre, const ActivationQuantizer &out,
                    int64_t code);

using CodeFunction = std::function<double(double)>;

// A polynomial of each segment, coefficients (segments, degree + 1) in powers of code - start.
struct Spline {
    std::vector<int64_t> starts;
    std::vector<double> coefficients;
};

// A continuous spline near the least maximum error over the codes first..last. degree: 1 or 2.
Spline fit_spline(const CodeFunction &f, int64_t first, int64_t last, int segments, int degree);

}  // namespace quant_gru
