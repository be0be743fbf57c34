// Rectifiers with a bit per element, and their backward.
//
// Macro KIND: 0 clamps to low..high, where NaN as `high` is no limit; 1 multiplies by `slope` up to
// 0.
#include "actnn/saving/cuda/pointwise.cuh"

// Writes y and bits: whether the gradient passes unchanged. y may be null.
extern "C" __global__ void __launch_bounds__(kThreads)
    rectify(const __grid_constant__ Pointwise p) {
    uint32_t bits = 0;
    const bool some = for_each(p, [&](int i, float v) {
        if (KIND == 1) {
            const bool inside = v > 0.f;  // a NaN counts as negative, as in torch
            bits |= (uint32_t)inside << i;
            return inside ? v : v * p.slope;
        }
        const bool low = v <= p.low, high = v >= p.high;
        bits |= (uint32_t)!(low || high) << i;
        return low ? p.low : high ? p.high : v;
    });
    if (some) p.bits[first_element() / kEach] = (uint8_t)bits;
}

// y = x where the bit is set, else slope x; 0 if the slope is 0.
extern "C" __global__ void __launch_bounds__(kThreads) pass(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    const uint32_t bits = first < p.n ? p.bits[first / kEach] : 0;
    for_each(p, [&](int i, float v) {
        return bits >> i & 1 ? v : p.slope == 0.f ? 0.f : v * p.slope;
    });
}

// y = x, at least `low`, where the bit is set, else 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    restore(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    const uint32_t bits = first < p.n ? p.bits[first / kEach] : 0;
    for_each(p, [&](int i, float v) { return bits >> i & 1 ? (v < p.low ? p.low : v) : v * 0.f; });
}
