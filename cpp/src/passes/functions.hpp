// Sigmoid and tanh of the float passes, in a form that compilers turn into vector code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "passes/clones.hpp"

namespace quant_gru {

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87.
QG_BODY float exp_of_negative(float x) {
    x = x < -87.f ? -87.f : x;
    const float shifted = x * 1.44269504f + 12582912.f;  // rounds to an integer
    const float n = shifted - 12582912.f;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.f / 5040;
    p = p * r + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

QG_BODY double exp_of_negative(double x) { return std::exp(x); }

template <class T>
QG_BODY T sigmoid(T x) {
    const T e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : T(1)) / (1 + e);
}

template <class T>
QG_BODY T hyperbolic_tangent(T x) {
    const T e = exp_of_negative(x < 0 ? 2 * x : -2 * x), y = (1 - e) / (1 + e);
    return x < 0 ? -y : y;
}

}  // namespace quant_gru
