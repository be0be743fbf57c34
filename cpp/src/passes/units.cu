// The kernels of float passes. REAL is float or double.
#include "kernel_runtime/cuda/ptx.cuh"
#include "passes/units.hpp"

using namespace quant_gru;
using T = REAL;
using ForwardC = ForwardUnits<T>;
using BackwardC = BackwardUnits<T>;
using ColumnsC = ColumnSums<T>;

// The gates of all units of a step.
extern "C" __global__ void forward_units(const __grid_constant__ ForwardC c) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, H = c.H;
    if (index >= c.count) return;
    const int64_t row = index / H, j = index % H;
    const UnitGates<T> u = gates_of_unit(c.Wx + row * 3 * H, c.Rh + row * 3 * H, c.bx, c.br, H, j);
    if (c.v) {
        T *const v = c.v + row * 4 * H + j;
        v[0] = u.z;
        v[H] = u.r;
        v[2 * H] = u.g;
        v[3 * H] = u.q;
    }
    const T taken = c.zoneout == Zoneout::masked ? c.mask[index] : T(1);
    c.out[index] = next_state(u, c.h[index], c.zoneout, taken, c.share);
}

// The derivatives of all units of a step.
extern "C" __global__ void backward_units(const __grid_constant__ BackwardC c) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, H = c.H;
    if (index >= c.count) return;
    const int64_t row = index / H, j = index % H;
    const T *const v = c.v + row * 4 * H + j;
    const UnitGates<T> u{v[0], v[H], v[2 * H], v[3 * H]};
    const UnitGradients<T> d =
        gradients_of_unit(u, c.h[row * c.row + j * c.unit], c.mask ? c.mask[index] : T(1),
                          c.dh_new[index] + c.dh[index]);
    c.dh[index] = d.dh;
    T *const dp = c.dp + row * 3 * H + j, *const dq = c.dq + row * 3 * H + j;
    dp[0] = dq[0] = d.dz;
    dp[H] = dq[H] = d.dr;
    dp[2 * H] = d.dg;
    dq[2 * H] = d.dq;
}

// Adds the sums of 32 columns to the gradients of biases. blockIdx.y: of bx, of br.
extern "C" __global__ void add_columns(const __grid_constant__ ColumnsC c) {
    constexpr int kLines = 32;
    SHARED_MEMORY(memory);
    auto *const sums = reinterpret_cast<T(*)[kColumnStride]>(memory);  // (kLines, columns)
    const int place = threadIdx.x % 32, line = threadIdx.x / 32;
    const int64_t column = int64_t{blockIdx.x} * 32 + place;
    const T *const rows = blockIdx.y ? c.dq : c.dp;
    T sum = 0;
    if (column < c.columns)
        for (int64_t row = line; row < c.rows; row += kLines) sum += rows[row * c.columns + column];
    sums[line][place] = sum;
    for (int half = kLines / 2; half > 0; half /= 2) {
        __syncthreads();
        if (line < half) sums[line][place] += sums[line + half][place];
    }
    if (line == 0 && column < c.columns) (blockIdx.y ? c.dbr : c.dbx)[column] += sums[0][place];
}
