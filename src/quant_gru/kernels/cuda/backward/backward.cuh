// Types and functions that the kernels of the backward share.
#ifndef QUANT_GRU_BACKWARD_CUH
#define QUANT_GRU_BACKWARD_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

// The constants of a channel of W x or R h for an int8 GEMM.
struct Channel {
    int64_t folded;  // bias with zero points folded in, in accumulator units
    double m;        // M / 2^k
    float m_float;   // the same
    int32_t exact;   // whether float represents every accumulator exactly, and m is in its range
};

// Words that are loaded or stored at once.
template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Words {
    uint32_t of[kBytes / 4];
};

// The type of GEMM operands. OPERAND: 0 bfloat16, 1 float, 2 double.
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

// Four derivatives of an element, stored as half if HALF, otherwise as float.
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

// Return PyTorch's row of a weight. The order of gates is update, reset, candidate in a plan, and
// reset, update, candidate in PyTorch.
inline int64_t reordered(int gate, int64_t unit, int64_t H) {
    return (gate == 0 ? H : gate == 1 ? 0 : 2 * H) + unit;
}

#endif
