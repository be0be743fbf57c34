// Adds the mean errors of the input weights to the input bias, and chooses its scales again.
#include "weights/choose_scale.cuh"

extern "C" __global__ void __launch_bounds__(256) correct_bias(const __grid_constant__ Weights w) {
    const Operand &o = w.operands[0];
    const int lane = threadIdx.x % 32, rows = 3 * (int)w.H, K = (int)o.K;
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    bool ignored = false;
    const float scale = qg_matrix_scale(fabs(o.w_scale[row]), largest_of(o.w_scale, rows, ignored));
    const double factor = qg_row_factor(scale);
    double sum = 0;
#pragma unroll 4
    for (int i = lane; i < K; i += 32) {
        const float v = real(o.w, o.w_real, (int64_t)row * K + i, ignored);
        const int64_t code = qg_code(v, scale, o.lo, o.hi);
        sum += qg_mean_error(v, scale, (double)code, factor, o.factors[i], o.term_limit);
    }
    const float b = o.b ? real(o.b, o.b_real, row, ignored) : 0.f;
    const float corrected = qg_corrected(b, warp_sum(sum), scale, (int)o.unit_exponent);
    const double b_scale =
        row_scale(&corrected, 0, 0, 1, (int)o.b_bits, o.b_lo, o.b_hi, w.free != 0);
    if (lane) return;
    o.corrected[row] = corrected;
    // the sign says that the bias is not finite
    o.b_scale[row] = bits_of(o.b_scale[row]) < 0 ? -b_scale : b_scale;
}
