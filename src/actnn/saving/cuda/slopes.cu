// Derivatives of activations as codes of a fixed range, rounded stochastically, and their use.
//
// Macros: KIND, see `slope`; BITS, 1 to 8. `low` is the least derivative, `slope` the step between
// codes; `high` is 1 / step in `slopes`.
#include "actnn/saving/cuda/pointwise.cuh"
#include "kernel_runtime/c99/philox.h"

constexpr int kMost = (1 << BITS) - 1;
constexpr int kFraction = 15;  // bits of noise
constexpr float kMagic = 8388608.f;  // 2^23: the last bit of a number from here on is a unit

#if BITS <= 4
typedef uint32_t Codes;  // of 8 elements
#else
typedef uint64_t Codes;
#endif

inline float logistic(float v) { return 1.f / (1.f + expf(-v)); }

// The derivative at an input, or at an output for sigmoid and tanh.
inline float slope(float v) {
    if (KIND == 0) {  // GELU
        // The normal distribution function within 1e-7. Source: M. Abramowitz and I. A. Stegun,
        // "Handbook of Mathematical Functions", 7.1.26.
        const float t = reciprocal(fmaf(0.23164189f, fabsf(v), 1.f));
        const float density = power_of_two(-0.72134752f * v * v);
        float above = fmaf(0.53070271f, t, -0.72657601f);
        above = fmaf(above, t, 0.71070687f);
        above = fmaf(above, t, -0.14224836f);
        above = fmaf(above, t, 0.12741480f) * t * density;
        return fmaf(v * 0.39894228f, density, v < 0.f ? above : 1.f - above);
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

// The codes of 8 elements: BITS bytes, a little-endian bit stream.
inline void store(uint8_t *to, Codes codes) {
    if (BITS == 8)
        *(uint64_t *)to = codes;
    else if (BITS == 4)
        *(uint32_t *)to = (uint32_t)codes;
    else
        for (int k = 0; k < BITS; ++k) to[k] = (uint8_t)(codes >> 8 * k);
}

inline Codes load(const uint8_t *from) {
    if (BITS == 8) return *(const uint64_t *)from;
    if (BITS == 4) return *(const uint32_t *)from;
    Codes codes = 0;
    for (int k = 0; k < BITS; ++k) codes |= (Codes)from[k] << 8 * k;
    return codes;
}

extern "C" __global__ void __launch_bounds__(kThreads) slopes(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    if (first >= p.n) return;
    const uint64_t seed = (uint64_t)p.seed[0], block = (uint64_t)first / kEach;
    uint32_t words[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)p.tensor,
                         (uint32_t)p.seed[1]};
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    PHILOX4X32(words[0], words[1], words[2], words[3], key0, key1, 7)
    const float scale = p.high * (1 << kFraction);
    Codes codes = 0;
    for_each(p, [&](int i, float v) {
        // 2^23 + (code << kFraction) + its fraction; a NaN gives code 0
        const float noise = half_as_float(words[i / 2] >> 1 & 0x7FFF7FFFu, i % 2 * 2);
        const float code = fmaxf(fmaf(slope(v) - p.low, scale, noise), kMagic);
        const uint32_t word = float_bits(fminf(code, kMagic + ((kMost + 1 << kFraction) - 1)));
        codes |= (Codes)(word >> kFraction & kMost) << i * BITS;
        return v;
    });
    store(p.bits + block * BITS, codes);
}

// y = x * derivative.
extern "C" __global__ void __launch_bounds__(kThreads) times(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    if (first >= p.n) return;
    const Codes codes = load(p.bits + first / kEach * BITS);
    for_each(p, [&](int i, float v) {
        return v * fmaf((float)(uint32_t)(codes >> i * BITS & kMost), p.slope, p.low);
    });
}
