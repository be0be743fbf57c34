// After the gradients of all states: those of W x and R h, times the scales of x and h, as operands
// of the products with them, and their sums over all rows.
#include "backward.cuh"

struct Numbers {
    const float *d;             // (rows, H)
    const Slopes *of_R, *of_W;  // (rows, H): of the state before and R h; of W x
    Operand *dWx, *dRh;         // (rows, 3H), PyTorch's order; null: not wanted
    float *partial;             // (chunks, 6, H), or null: not wanted
    float *db;                  // (6, H): of the input's bias, then of the state's
    int64_t rows, H, chunk, chunks;
    float scale_x, scale_h;
};
struct Pair {
    Numbers d[DIRS];
};

extern "C" __global__ void __launch_bounds__(256) outer(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y % DIRS];
    QG_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t unit = (int64_t)(blockIdx.y / DIRS) * 32 + lane, H = p.H;
    const int64_t first = blockIdx.x * p.chunk;
    const int64_t last = first + p.chunk < p.rows ? first + p.chunk : p.rows;
    float total[6] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (unit < H) {
#pragma unroll 4
        for (int64_t row = first + warp; row < last; row += 8) {
            const int64_t at = row * H + unit;
            const float d = p.d[at];
            const Slopes of_W = p.of_W[at], of_R = p.of_R[at];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                const int64_t to = 3 * row * H + reordered(gate, unit, H);
                const float x = slope(of_W, gate) * d, h = slope(of_R, 1 + gate) * d;
                total[gate] += x;
                total[3 + gate] += h;
                if (p.dWx) p.dWx[to] = operand(x * p.scale_x);
                if (p.dRh) p.dRh[to] = operand(h * p.scale_h);
            }
        }
    }
    if (!p.partial) return;
    float *const shared = (float *)memory;  // [warp][6][32]
#pragma unroll
    for (int i = 0; i < 6; ++i) shared[(warp * 6 + i) * 32 + lane] = total[i];
    __syncthreads();
    if (threadIdx.x >= 192 || unit >= H) return;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += shared[(i * 6 + warp) * 32 + lane];
    p.partial[(blockIdx.x * 6 + warp) * H + unit] = sum;
}

// The sums of all chunks, in PyTorch's order.
extern "C" __global__ void __launch_bounds__(256) outer_sums(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y];
    QG_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t i = (int64_t)blockIdx.x * 32 + lane, H = p.H;
    float sum = 0.f;
    if (i < 6 * H)
#pragma unroll 4
        for (int64_t c = warp; c < p.chunks; c += 8) sum += p.partial[c * 6 * H + i];
    float *const shared = (float *)memory;
    shared[warp * 32 + lane] = sum;
    __syncthreads();
    if (warp || i >= 6 * H) return;
    sum = 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k) sum += shared[k * 32 + lane];
    const int64_t which = i / (3 * H), gate = i / H % 3, unit = i % H;
    p.db[which * 3 * H + reordered((int)gate, unit, H)] = sum;
}
