// Derives from codes what kernels read of weights besides them; requantize.cu does so in training.
#include "weights/derived.cuh"

// What the other kernel only lowers, and the column of ones in operands of two planes.
extern "C" __global__ void __launch_bounds__(256) begin_derived(const __grid_constant__ Weights w) {
    const Operand &o = w.operands[blockIdx.y];
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 2 && o.exact_float) o.exact_float[i] = 1;
    if (i < o.K && o.gemm && o.planes == 2) o.gemm[6 * w.H * o.padded + i] = 1;
}

extern "C" __global__ void __launch_bounds__(256)
    derive_weights(const __grid_constant__ Weights w) {
    const int which = blockIdx.y, lane = threadIdx.x % 32, H = (int)w.H;
    const Operand &o = w.operands[which];
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= 3 * H) return;
    const int gate = row / H, unit = row % H;
    RowSums sums{};
#pragma unroll 4
    for (int i = lane; i < o.K; i += 32) {
        const int code = (int)read_code(o.codes, o.kind, row * o.K + i);
        add_code(w, which, gate, unit, i, code, sums);
        if (w.columns[which]) w.columns[which][(int64_t)i * 3 * H + row] = code;
    }
    sums = warp_sum(sums);
    if (lane) return;
    const double m = (double)o.M[row] * qg_power((int)-o.k[row]);
    finish_row(w, which, gate, unit, o.B[row], m, sums);
}
