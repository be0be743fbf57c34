// The gradients of W x and R h from the gradients of all states. They are multiplied by the scales
// of x and h and stored as operands of the final GEMMs. Their sums over all rows are the gradients
// of the biases.
//
//   WIDE     units per thread: 1 or, if H is even, 2
//   HALF, OPERAND, DIRS: see operands.cu
#include "backward/backward.cuh"

#ifndef AHEAD
#define AHEAD (HALF ? 4 : 2)  // rows that a warp loads at once
#endif

struct Numbers {
    const float *d;                  // (rows, H)
    const Derivatives *of_R, *of_W;  // (rows, H): for the previous state and R h; for W x
    Operand *dWx, *dRh;              // (rows, 3H), PyTorch's order; null if not wanted
    float *partial;                  // (chunks, 6, H); null if not wanted
    float *bw, *br;                  // (3H,), gradients of the biases; null if not wanted
    int64_t rows, H, chunk, chunks;
    float scale_x, scale_h;
};
struct Pair {
    Numbers d[DIRS];
};

struct alignas(WIDE * sizeof(Derivatives)) DerivativesOfUnits {
    Derivatives of[WIDE];
};
struct alignas(WIDE * 4) Floats {
    float of[WIDE];
};

inline void put(Operand *to, const float (&v)[WIDE], float scale) {
#if WIDE == 2 && OPERAND == 0
    *(uint32_t *)to = bf16_pair(v[0] * scale, v[WIDE - 1] * scale);
#else
#pragma unroll
    for (int i = 0; i < WIDE; ++i) to[i] = operand(v[i] * scale);
#endif
}

extern "C" __global__ void __launch_bounds__(256) outer(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y % DIRS];
    QG_SHARED(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t unit = ((int64_t)(blockIdx.y / DIRS) * 32 + lane) * WIDE, H = p.H;
    const int64_t first = blockIdx.x * p.chunk;
    const int64_t last = first + p.chunk < p.rows ? first + p.chunk : p.rows;
    float total[6][WIDE];
#pragma unroll
    for (int i = 0; i < 6 * WIDE; ++i) total[i % 6][i / 6] = 0.f;
    if (unit < H) {
        for (int64_t start = first + warp; start < last; start += 8 * AHEAD) {
            // the stores may alias the loads, so a batch of loads is issued before them
            Floats d[AHEAD];
            DerivativesOfUnits of_W[AHEAD], of_R[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                const int64_t at = (start + 8 * j) * H + unit;
                if (start + 8 * j >= last) break;
                d[j] = *(const Floats *)(p.d + at);
                of_W[j] = *(const DerivativesOfUnits *)(p.of_W + at);
                of_R[j] = *(const DerivativesOfUnits *)(p.of_R + at);
            }
#pragma unroll
            for (int j = 0; j < AHEAD; ++j) {
                const int64_t row = start + 8 * j;
                if (row >= last) break;
#pragma unroll
                for (int gate = 0; gate < 3; ++gate) {
                    const int64_t to = 3 * row * H + reordered(gate, unit, H);
                    float x[WIDE], h[WIDE];
#pragma unroll
                    for (int i = 0; i < WIDE; ++i) {
                        x[i] = derivative(of_W[j].of[i], gate) * d[j].of[i];
                        h[i] = derivative(of_R[j].of[i], 1 + gate) * d[j].of[i];
                        total[gate][i] += x[i];
                        total[3 + gate][i] += h[i];
                    }
                    if (p.dWx) put(p.dWx + to, x, p.scale_x);
                    if (p.dRh) put(p.dRh + to, h, p.scale_h);
                }
            }
        }
    }
    if (!p.partial) return;
    float *const shared = (float *)memory;  // [warp][6][WIDE][32]
#pragma unroll
    for (int i = 0; i < 6 * WIDE; ++i)
        shared[(warp * 6 * WIDE + i) * 32 + lane] = total[i / WIDE][i % WIDE];
    __syncthreads();
    if (unit >= H) return;
    for (int i = warp; i < 6 * WIDE; i += 8) {
        float sum = 0.f;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += shared[(k * 6 * WIDE + i) * 32 + lane];
        p.partial[(blockIdx.x * 6 + i / WIDE) * H + unit + i % WIDE] = sum;
    }
}

// Add the sums of all chunks, and store the result in PyTorch's order.
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
    if (float *const to = which ? p.br : p.bw) to[reordered((int)gate, unit, H)] = sum;
}
