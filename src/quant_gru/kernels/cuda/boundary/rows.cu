// Rows of a call: steps beyond the length of a sequence, and the caller's layout of results.
#include <stdint.h>

#include "kernel_runtime/cuda/ptx.cuh"

struct Padding {
    uint8_t *nan;            // (N, stride): whether a row of the input is NaN at a step
    const int64_t *lengths;  // (N)
    int64_t T, N, stride;
};

// Ignores NaN beyond the lengths. A thread clears one flag.
extern "C" __global__ void __launch_bounds__(256) clear_padding(const __grid_constant__ Padding p) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.T * p.N) return;
    const int64_t n = i / p.T, t = i % p.T;
    if (t >= p.lengths[n]) p.nan[n * p.stride + t] = 0;
}

struct Results {
    const float *from;       // (T, N, features)
    float *to;               // [t * step + n * next + feature]; may be `from`
    const int64_t *lengths;  // (N), or null
    int64_t T, N, features, step, next;
};

// Copies results; steps beyond the lengths are 0. A warp copies one row.
extern "C" __global__ void __launch_bounds__(256) place_results(const __grid_constant__ Results p) {
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.T * p.N) return;
    const int64_t t = row / p.N, n = row % p.N;
    const bool there = !p.lengths || t < p.lengths[n];
    const float *const from = p.from + row * p.features;
    float *const to = p.to + t * p.step + n * p.next;
    for (int64_t i = threadIdx.x % 32; i < p.features; i += 32) to[i] = there ? from[i] : 0.f;
}
