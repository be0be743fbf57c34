// The kernels of float passes. REAL is float or double, STEP_ROWS the rows of a block of a fused
// step.
#include "kernel_runtime/cuda/ptx.cuh"
#include "passes/units.hpp"

using namespace quant_gru;
using T = REAL;
using ForwardC = ForwardUnits<T>;
using BackwardC = BackwardUnits<T>;
using ColumnsC = ColumnSums<T>;

constexpr int kStepRows = STEP_ROWS;
using ForwardStepC = ForwardStep<T>;
using BackwardStepC = BackwardStep<T>;

inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
inline double multiply_add(double a, double b, double c) { return __fma_rn(a, b, c); }

// The gates of one unit and row, from its products with R.
inline void forward_unit(const ForwardC &c, int64_t row, int64_t j, T Rh_z, T Rh_r, T Rh_g) {
    const int64_t H = c.H, index = row * H + j;
    const UnitGates<T> u = gates_of_unit(c.Wx + row * 3 * H, c.bx, c.br, H, j, Rh_z, Rh_r, Rh_g);
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

// The derivatives of one unit and row; dh is the gradient that later steps pass on.
inline void backward_unit(const BackwardC &c, int64_t row, int64_t j, T dh) {
    const int64_t H = c.H, index = row * H + j;
    const T *const v = c.v + row * 4 * H + j;
    const UnitGates<T> u{v[0], v[H], v[2 * H], v[3 * H]};
    const UnitGradients<T> d = gradients_of_unit(
        u, c.h[row * c.row + j * c.unit], c.mask ? c.mask[index] : T(1), c.dh_new[index] + dh);
    c.dh[index] = d.dh;
    T *const dp = c.dp + row * 3 * H + j, *const dq = c.dq + row * 3 * H + j;
    dp[0] = dq[0] = d.dz;
    dp[H] = dq[H] = d.dr;
    dp[2 * H] = d.dg;
    dq[2 * H] = d.dq;
}

// All units of a step, after its product with R.
extern "C" __global__ void forward_units(const __grid_constant__ ForwardC c) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, H = c.H;
    if (index >= c.count) return;
    const T *const Rh = c.Rh + index / H * 3 * H + index % H;
    forward_unit(c, index / H, index % H, Rh[0], Rh[H], Rh[2 * H]);
}

extern "C" __global__ void backward_units(const __grid_constant__ BackwardC c) {
    const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (index < c.count) backward_unit(c, index / c.H, index % c.H, c.dh[index]);
}

// The products of A (N, K) and B (K, gates * H) for the row and the unit of this thread, if it has
// one.
template <int gates>
inline void products(const T *A, int64_t N, int64_t K, const T *B, int64_t H, T *memory,
                     T (&found)[gates]) {
    const int lane = threadIdx.x % kStepUnits, warp = threadIdx.x / kStepUnits;
    const int64_t first_row = int64_t{blockIdx.y} * kStepRows;
    int64_t unit = int64_t{blockIdx.x} * kStepUnits + lane;
    if (unit >= H) unit = H - 1;                                // its sums are not used
    struct alignas(kStepRows == 1 ? sizeof(T) : 16) Operands {  // of a feature
        T rows[kStepRows];
    };
    const auto *const operands = (const Operands *)memory;
    T sums[gates][kStepRows] = {};
    for (int64_t first = 0; first < K; first += kStepChunk) {
        const int depth = K - first < kStepChunk ? int(K - first) : kStepChunk;
        __syncthreads();
        for (int k = lane; warp < kStepRows && k < depth; k += kStepUnits)
            memory[k * kStepRows + warp] =
                first_row + warp < N ? A[(first_row + warp) * K + first + k] : T(0);
        __syncthreads();
#pragma unroll 8
        for (int k = warp; k < depth; k += kStepWarps) {
            const T *const b = B + (first + k) * gates * H + unit;
            const Operands a = operands[k];
            for (int gate = 0; gate < gates; ++gate) {
                const T factor = b[gate * H];
                for (int row = 0; row < kStepRows; ++row)
                    sums[gate][row] = multiply_add(a.rows[row], factor, sums[gate][row]);
            }
        }
    }
    __syncthreads();
    for (int gate = 0; gate < gates; ++gate)
        for (int row = 0; row < kStepRows; ++row)
            memory[((warp * gates + gate) * kStepRows + row) * kStepUnits + lane] = sums[gate][row];
    __syncthreads();
    if (warp >= kStepRows) return;
    for (int gate = 0; gate < gates; ++gate) {
        found[gate] = 0;
        for (int part = 0; part < kStepWarps; ++part)
            found[gate] += memory[((part * gates + gate) * kStepRows + warp) * kStepUnits + lane];
    }
}

// The row and the unit of this thread in a step; a row of N if it has none.
inline int64_t step_row(int64_t N) {
    const int row = threadIdx.x / kStepUnits;
    return row < kStepRows ? int64_t{blockIdx.y} * kStepRows + row : N;
}
inline int64_t step_unit() { return int64_t{blockIdx.x} * kStepUnits + threadIdx.x % kStepUnits; }

extern "C" __global__ void forward_step(const __grid_constant__ ForwardStepC c) {
    SHARED_MEMORY(memory);
    await_launches();
    let_next_start();
    const int64_t H = c.units.H, row = step_row(c.N), unit = step_unit();
    T Rh[3];
    products<3>(c.units.h, c.N, H, c.R, H, (T *)memory, Rh);
    if (row < c.N && unit < H) forward_unit(c.units, row, unit, Rh[0], Rh[1], Rh[2]);
}

extern "C" __global__ void backward_step(const __grid_constant__ BackwardStepC c) {
    SHARED_MEMORY(memory);
    await_launches();
    let_next_start();
    const int64_t H = c.units.H, row = step_row(c.N), unit = step_unit();
    T passed_on[1] = {0};
    if (c.dq_after) products<1>(c.dq_after, c.N, 3 * H, c.R_t, H, (T *)memory, passed_on);
    if (row >= c.N || unit >= H) return;
    const T dh = c.units.dh[row * H + unit] + passed_on[0];
    if (c.units.v)
        backward_unit(c.units, row, unit, dh);
    else
        c.units.dh[row * H + unit] = dh;
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
