// Arrays of a caller in the order that kernels read, and gradients in the caller's order. CODE is
// int8_t or int16_t. A thread writes one element.
#include "kernel_runtime/cuda/ptx.cuh"
#include "passes/code_conversions.hpp"

using namespace quant_gru;

inline int64_t element() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }

// To (n, m).
extern "C" __global__ void transpose(const __grid_constant__ RearrangedC c) {
    const int64_t i = element();
    if (i < c.m * c.n) ((CODE *)c.to)[i] = ((const CODE *)c.from)[i % c.m * c.n + i / c.m];
}

// 1 where a mask is 0: units that keep their state.
extern "C" __global__ void hold(const __grid_constant__ RearrangedC c) {
    const int64_t i = element();
    if (i < c.m * c.n) ((uint8_t *)c.to)[i] = ((const CODE *)c.from)[i] == 0;
}

// Adds rows (3H, n), reset, update, candidate, to columns (n, 3H), update, reset, candidate. m is
// 3H.
extern "C" __global__ void add_columns(const __grid_constant__ RearrangedC c) {
    const int64_t i = element(), column = i % c.m, third = c.m / 3;
    const int64_t row = column < third       ? column + third
                        : column < 2 * third ? column - third
                                             : column;
    if (i < c.m * c.n) ((float *)c.to)[i] += ((const float *)c.from)[row * c.n + i / c.m];
}
