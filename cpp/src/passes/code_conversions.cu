// Conversions of codes to real values and back, which are exact. CODE is int8_t or int16_t.
#include "kernel_runtime/cuda/ptx.cuh"
#include "passes/code_conversions.hpp"

using namespace quant_gru;
using ConversionC = CodesAndReals<CODE>;

extern "C" __global__ void to_reals(const __grid_constant__ ConversionC c) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < c.count) c.reals[i] = c.scale * (float(c.codes[i]) - c.zero);
}

extern "C" __global__ void to_codes(const __grid_constant__ ConversionC c) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < c.count) c.codes[i] = CODE(__float2int_rn(c.reals[i] / c.scale + c.zero));
}
