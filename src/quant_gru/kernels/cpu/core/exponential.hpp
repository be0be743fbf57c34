// exp in a form that compilers turn into vector code.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/core/clones.hpp"

namespace quant_gru {

// How exp is computed: n = rint(x log2(e)) with the sum of a large number, whose last bits are then
// n; a polynomial of x - n log(2); and 2^n from its bits.
template <class T>
struct Exponential;
template <>
struct Exponential<float> {
    using Bits = int32_t;
    static constexpr float least = -87.f, log2_e = 1.44269504f, rounder = 12582912.f;
    static constexpr float log_2 = 0.693145752f, rest = 1.42860677e-6f;
    static constexpr int degree = 7, bias = 127, mantissa = 23;
};
template <>
struct Exponential<double> {
    using Bits = int64_t;
    static constexpr double least = -708, log2_e = 1.4426950408889634, rounder = 6755399441055744.;
    static constexpr double log_2 = 0.693147180369123816490, rest = 1.90821492927058770002e-10;
    static constexpr int degree = 13, bias = 1023, mantissa = 52;
};

// 1 / n! + r / (n + 1)! + .. up to the last degree.
template <class T, int n>
QG_BODY T series(T r) {
    constexpr double factorial[] = {1,    1,     2,      6,       24,       120,       720,
                                    5040, 40320, 362880, 3628800, 39916800, 479001600, 6227020800};
    constexpr T first = static_cast<T>(1 / factorial[n]);
    if constexpr (n == Exponential<T>::degree)
        return first;
    else
        return first + r * series<T, n + 1>(r);
}

// exp(x) for x <= 0, within 2 units in the last place; exp(least) below `least`.
template <class T>
QG_BODY T exp_of_negative(T x) {
    using E = Exponential<T>;
    using Bits = typename E::Bits;
    x = x < E::least ? E::least : x;
    const T shifted = x * E::log2_e + E::rounder, n = shifted - E::rounder;
    const T r = (x - n * E::log_2) - n * E::rest;
    const T p = series<T, 2>(r) * r * r + r + 1;
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    // unsigned, because bits of `rounder` are shifted out
    using Word = std::make_unsigned_t<Bits>;
    bits = static_cast<Bits>((static_cast<Word>(bits) + Word{E::bias}) << E::mantissa);
    T power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

}  // namespace quant_gru
