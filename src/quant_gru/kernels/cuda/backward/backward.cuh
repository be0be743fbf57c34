// What the kernels of the backward share.
#ifndef QUANT_GRU_BACKWARD_CUH
#define QUANT_GRU_BACKWARD_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

// A channel of W x or R h, as the product of bytes needs it.
struct Channel {
    int64_t folded;  // bias and zero points, in accumulator units
    double m;        // M / 2^k
    float m_float;   // the same
    int32_t exact;   // whether float holds every accumulator and m
};

// Loaded or stored at once.
template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Words {
    uint32_t of[kBytes / 4];
};

// Operands of matrix products and stored derivatives. OPERAND: 0 bfloat16, 1 float, 2 double.
#if OPERAND == 0
typedef uint16_t Operand;
inline Operand operand(float v) { return (uint16_t)bf16_pair(v, 0.f); }
#elif OPERAND == 1
typedef float Operand;
inline Operand operand(float v) { return v; }
#else
typedef double Operand;
inline Operand operand(float v) { return (double)v; }
#endif

// Four derivatives of an element: halves where HALF, otherwise floats.
#if HALF
typedef uint2 Derivatives;
inline Derivatives derivatives(float a, float b, float c, float d) {
    Derivatives s;
    s.x = half_pair(a, b);
    s.y = half_pair(c, d);
    return s;
}
inline float derivative(const Derivatives &s, int i) {
    const uint32_t pair = i & 2 ? s.y : s.x;
    return i & 1 ? second_half(pair) : first_half(pair);
}
#else
typedef uint4 Derivatives;
inline Derivatives derivatives(float a, float b, float c, float d) {
    Derivatives s;
    s.x = float_bits(a);
    s.y = float_bits(b);
    s.z = float_bits(c);
    s.w = float_bits(d);
    return s;
}
inline float derivative(const Derivatives &s, int i) {
    return bits_as_float(i == 0 ? s.x : i == 1 ? s.y : i == 2 ? s.z : s.w);
}
#endif

// Rows of a weight: update, reset, candidate in a plan; reset, update, candidate in PyTorch.
inline int64_t reordered(int gate, int64_t unit, int64_t H) {
    return (gate == 0 ? H : gate == 1 ? 0 : 2 * H) + unit;
}

#endif
