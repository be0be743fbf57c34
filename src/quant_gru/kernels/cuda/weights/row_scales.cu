// Chooses the scales of weight rows and of biases.
#include "weights/choose_scale.cuh"

extern "C" __global__ void __launch_bounds__(256) row_scales(const __grid_constant__ Weights w) {
    const Operand &o = w.operands[blockIdx.y];
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= 3 * w.H) return;
    const int K = (int)o.K;
    const bool first_lane = threadIdx.x % 32 == 0;
    // one loop for the row and its bias, so that the code is not duplicated
#pragma unroll 1
    for (int bias = 0; bias < 2; ++bias) {
        const double scale =
            row_scale(bias ? o.b : o.w, bias ? o.b_real : o.w_real, bias ? row : (int64_t)row * K,
                      bias ? o.b != nullptr : K, (int)(bias ? o.b_bits : o.bits),
                      bias ? o.b_lo : o.lo, bias ? o.b_hi : o.hi, w.free != 0);
        if (first_lane) (bias ? o.b_scale : o.w_scale)[row] = scale;
    }
    if (!first_lane) return;
    if (row == 0) {
        if (o.exact_float) o.exact_float[0] = o.exact_float[1] = 1;
        if (blockIdx.y == 0) *w.finite = 1;
    }
}
