// Functions in float64 with the same bits on every machine: integer/elementary.py has the same
// operations in the same order. Files that include this must not contract multiply-adds.
#pragma once

#include <cmath>
#include <vector>

namespace quant_gru {

// exp(r) = 1 + r + r^2 * (1/2! + r/3! + ..), for |r| <= ln(2) / 2
struct Exponential {
    double below;  // exp(r) - 1
    int exponent;  // exp(x) = (1 + below) * 2^exponent
};

inline Exponential exponential_of_negative(double x) {
    x = x < -700.0 ? -700.0 : x;
    const double n = std::rint(x * 1.4426950408889634);
    const double high = x - n * 6.93147180369123816490e-01, low = n * 1.90821492927058770002e-10;
    const double r = high - low, lost = (high - r) - low;
    double p = 1.0 / 6227020800.0;  // 1 / 13!
    static const double factorials[] = {479001600.0, 39916800.0, 3628800.0, 362880.0,
                                        40320.0,     5040.0,     720.0,     120.0,
                                        24.0,        6.0,        2.0};
    for (double factorial : factorials) p = p * r + 1.0 / factorial;
    return {r + (lost + r * r * p), static_cast<int>(n)};
}

inline double exact_sigmoid(double x) {
    const Exponential e = exponential_of_negative(-std::fabs(x));
    const double value = std::ldexp(1.0 + e.below, e.exponent);
    return (x >= 0 ? 1.0 : value) / (1.0 + value);
}

inline double exact_tanh(double x) {
    const Exponential e = exponential_of_negative(-2.0 * std::fabs(x));
    const double value = std::ldexp(1.0 + e.below, e.exponent);
    // near zero, 1 - exp(-2 |x|) is `-below` without cancellation
    const double y = e.exponent == 0 ? -e.below / (2.0 + e.below) : (1.0 - value) / (1.0 + value);
    return x < 0 ? -y : y;
}

// The cube root of x >= 0.
inline double cube_root(double x) {
    int exponent = 0;
    double m = std::frexp(x, &exponent);
    const int third = static_cast<int>(std::floor(exponent / 3.0));
    m = std::ldexp(m, exponent - 3 * third);  // in [1/2, 4)
    double y = 0.5 + 0.25 * m;
    for (int i = 0; i < 6; ++i) y = y - (y * y * y - m) / (3.0 * y * y);
    return x > 0 ? std::ldexp(y, third) : 0.0;
}

}  // namespace quant_gru
