// Masks a gradient where a quantizer clamped, for codes of up to 16 bits. A warp processes one row.
#include "boundary/quantize.cuh"

struct Mask {
    float *grad;         // (T * N, features), in place
    const float *real;   // [t * step + n * next + feature]
    const float *added;  // like grad, added after masking; or null
    int64_t step, next;  // in values
    int64_t rows, N, features;
    float scale, lo, hi;  // limits minus the zero point
};

// Set the gradient to 0 where a real value was clamped or is NaN. A NaN gradient stays NaN.
extern "C" __global__ void __launch_bounds__(256) mask_clamped(const __grid_constant__ Mask p) {
    const int row = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    if (row >= p.rows) return;
    const int N = (int)p.N, features = (int)p.features;
    const float *const from = p.real + row / N * p.step + row % N * p.next;
    float *const to = p.grad + (int64_t)row * features;
    const float *const added = p.added ? p.added + (int64_t)row * features : nullptr;
#pragma unroll 4
    for (int k = threadIdx.x % 32; k < features; k += 32) {
        // 4e6 exceeds all limits, so this clamp changes no result; NaN becomes -4e6 and is masked
        const float y = Magic<float>::limit(divided(from[k], p.scale), -4e6f, 4e6f);
        const float rounded = plain(round_exact<QG_INPUT_RULE>(y));
        const float kept =
            Magic<float>::times(to[k], rounded >= p.lo && rounded <= p.hi ? 1.f : 0.f);
        to[k] = added ? Magic<float>::plus(added[k], kept) : kept;
    }
}
