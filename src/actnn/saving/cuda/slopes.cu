// Derivatives of activations as codes of a fixed range, rounded stochastically, and their use.
//
// Macros: KIND, see `slope`; BITS, 1 to 8. `low` is the least derivative, `slope` the step between
// codes; `high` is 1 / step in `slopes`.
#include "actnn/saving/cuda/pointwise.cuh"
#include "kernel_runtime/c99/philox.h"

constexpr int kMost = (1 << BITS) - 1;

inline float logistic(float v) { return 1.f / (1.f + expf(-v)); }

// The derivative at an input, or at an output for sigmoid and tanh.
inline float slope(float v) {
    if (KIND == 0) {  // GELU
        return 0.5f * (1.f + erff(v * 0.70710678f)) + v * 0.39894228f * expf(-0.5f * v * v);
    }
    if (KIND == 1) {  // GELU with tanh
        const float inner = 0.79788456f * (v + 0.044715f * v * v * v);
        const float t = tanhf(inner), d = 0.79788456f * (1.f + 3.f * 0.044715f * v * v);
        return 0.5f * (1.f + t) + 0.5f * v * (1.f - t * t) * d;
    }
    if (KIND == 2) {  // SiLU
        const float s = logistic(v);
        return s * (1.f + v * (1.f - s));
    }
    if (KIND == 3) {  // Mish
        const float s = logistic(v), t = tanhf(v > 20.f ? v : log1pf(expf(v)));
        return t + v * s * (1.f - t * t);
    }
    if (KIND == 4) return v < -3.f ? 0.f : v <= 3.f ? v / 3.f + 0.5f : 1.f;  // Hardswish
    if (KIND == 5) return v * (1.f - v);                                     // sigmoid
    return 1.f - v * v;                                                      // tanh
}

// Writes the codes of 8 elements: BITS bytes, a little-endian bit stream.
extern "C" __global__ void __launch_bounds__(kThreads) slopes(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    if (first >= p.n) return;
    const uint64_t seed = (uint64_t)p.seed[0], block = (uint64_t)first / kEach;
    uint32_t words[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)p.tensor,
                         (uint32_t)p.seed[1]};
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    PHILOX4X32(words[0], words[1], words[2], words[3], key0, key1, 7)
    uint64_t codes = 0;
    for_each(p, [&](int i, float v) {
        const float noise = ((float)(words[i / 2] >> i % 2 * 16 & 0xFFFF) + 0.5f) * 0x1p-16f;
        const float code = floorf((slope(v) - p.low) * p.high + noise);
        // a NaN gives 0
        codes |= (uint64_t)(code > 0.f ? code < kMost ? (int)code : kMost : 0) << i * BITS;
        return v;
    });
    for (int k = 0; k < BITS; ++k) p.bits[block * BITS + k] = (uint8_t)(codes >> 8 * k);
}

// y = x * derivative.
extern "C" __global__ void __launch_bounds__(kThreads) times(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    if (first >= p.n) return;
    uint64_t codes = 0;
    for (int k = 0; k < BITS; ++k) codes |= (uint64_t)p.bits[first / kEach * BITS + k] << 8 * k;
    for_each(p, [&](int i, float v) {
        return v * (p.low + (float)(codes >> i * BITS & kMost) * p.slope);
    });
}
