// Raises the scale of each weight row to a minimum share of the largest scale. Then writes codes,
// biases, multipliers and all data that kernels derive from them.
#include "weights/derived.cuh"

extern "C" __global__ void __launch_bounds__(256)
    requantize_weights(const __grid_constant__ Weights w) {
    const int which = blockIdx.y, lane = threadIdx.x % 32, H = (int)w.H;
    const Operand &o = w.operands[which];
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= 3 * H) return;
    bool bad = false;
    const double largest = largest_of(o.w_scale, 3 * H, bad);
    const double b_largest = largest_of(o.b_scale, 3 * H, bad);
    if (row == 0 && any_lane(bad) && lane == 0) *w.finite = 0;
    const int gate = row / H == 0 ? 1 : row / H == 1 ? 0 : 2, unit = row % H;
    const int channel = gate * H + unit;
    const float scale = qg_matrix_scale(fabs(o.w_scale[row]), largest);
    RowSums sums{};
    bool ignored = false;
    const int K = (int)o.K;
#pragma unroll 4
    for (int i = lane; i < K; i += 32) {
        const int64_t at = row * o.K + i;
        int code = (int)qg_code(real(o.w, o.w_real, at, ignored), scale, o.lo, o.hi);
        if (o.dropped && o.dropped[at]) code = 0;
        write_code(o.codes, o.kind, channel * o.K + i, code);
        add_code(w, which, gate, unit, i, code, sums);
    }
    sums = warp_sum(sums);
    if (lane) return;
    float given = scale;
    if (which && o.dropped) {
        given = divided(scale, w.keep);
        given = given > (float)QG_LARGEST_SCALE ? (float)QG_LARGEST_SCALE : given;
    }
    const float b_scale = qg_bias_scale(fabs(o.b_scale[row]), b_largest);
    const float b = o.corrected ? o.corrected[row] : o.b ? real(o.b, o.b_real, row, ignored) : 0.f;
    const int64_t b_code = qg_code(b, b_scale, o.b_lo, o.b_hi);
    const qg_channel c = qg_channel_of(b_code, b_scale, given, o.operand_scale, o.result_scale,
                                       o.b_unit, o.limit, (int)o.significant);
    o.scales[channel] = given;
    o.b_scales[channel] = b_scale;
    write_code(o.b_codes, o.b_kind, channel, b_code);
    o.B[channel] = c.B;
    o.M[channel] = c.M;
    o.k[channel] = c.k;
    finish_row(w, which, gate, unit, c.B, c.m, sums);
}
