// Intrinsics of CUDA for single numbers, on the host.
#pragma once

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
// Rounded in another direction than to the nearest number. Operands are volatile: the compiler
// knows nothing of directions.
template <int kDirection, class Real>
inline Real rounded_to(Real a, Real b, Real c, bool fused) {
    volatile Real x = a, y = b, z = c;
    std::fesetround(kDirection);
    volatile Real found = fused ? std::fma(Real(x), Real(y), Real(z)) : Real(x + y);
    std::fesetround(FE_TONEAREST);
    return found;
}
inline float __fmaf_rd(float a, float b, float c) { return rounded_to<FE_DOWNWARD>(a, b, c, true); }
inline double __fma_rd(double a, double b, double c) {
    return rounded_to<FE_DOWNWARD>(a, b, c, true);
}
inline float __fadd_rd(float a, float b) { return rounded_to<FE_DOWNWARD>(a, b, 0.f, false); }
inline double __dadd_rd(double a, double b) { return rounded_to<FE_DOWNWARD>(a, b, 0., false); }
inline int32_t __float_as_int(float v) {
    int32_t i;
    std::memcpy(&i, &v, 4);
    return i;
}
inline int32_t __double2loint(double v) {
    int64_t i;
    std::memcpy(&i, &v, 8);
    return int32_t(i);
}
inline float __int_as_float(int32_t i) {
    float v;
    std::memcpy(&v, &i, 4);
    return v;
}
