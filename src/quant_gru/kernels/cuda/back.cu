// The gradient of the states, from the last step to the first, in one launch. A cluster of CL
// blocks takes a tile of NB rows through time. A block owns U units: it turns their gradients into
// those of R h, multiplies these by its columns of R transposed, which stay in registers as the A
// operand of the matrix instruction, and sends each block of the cluster what concerns its units.
//
//   U        units of a block, a multiple of 8
//   CL       blocks of a cluster
//   MT, KS   tiles of 16 rows of the product of a warp; warps that share its depth
//   KP       depth: 3 * U, padded to a multiple of 32 * KS
//   NB       rows of a tile: 1, 2, 4 or 8
//   PL, WP   parts of bfloat16 in which gradients and weights are multiplied
//   HALF     slopes are stored in half precision
//   DIRS     directions of a launch
#include "backward.cuh"

constexpr int kUnits = U * CL;
constexpr int kGroups = (kUnits + 16 * MT - 1) / (16 * MT);
constexpr int kThreads = kGroups * KS * 32;
constexpr int kLoads = KP / 32 / KS;                   // of a warp, of 16 bytes a thread
constexpr int kRow = (KP * 2 + 127) / 128 * 128 + 64;  // free of bank conflicts
constexpr int kPlane = NB * kRow;
constexpr int kColumns = NB == 1 ? 2 : NB;
constexpr int kPitch = NB == 8 ? 10 : NB == 4 ? 6 : 2;  // floats of a unit's sums
constexpr int kPart = U * kPitch;
constexpr int kSums = CL * KS * kPart;
constexpr int kElements = (U * NB + kThreads - 1) / kThreads;
constexpr int kSets = MT >= 4 ? 1 : MT >= 2 ? 2 : 4;  // independent sums of a tile
constexpr uint32_t kReceived = CL * KS * U * kColumns * 4;

static_assert(U % 8 == 0 && KP % (32 * KS) == 0 && KP >= 3 * U, "padding");

struct Numbers {
    const uint32_t *weights;  // fragments, [rank][part of the depth][group][plane][step][tile]..
    const Slopes *slopes;     // (T, N, H): of the state before, of R h
    const float *scales;      // (3H) of R
    const float *grad_out;    // (T, N, H), strided
    const float *grad_last;   // (N, H)
    const int64_t *lengths;   // (N) or null
    float *d;                 // (T, N, H): gradient of each state
    float *dh0;               // (N, H)
    int64_t T, N, H, reverse;
    int64_t stride_t, stride_n, stride_h;
};
struct Pair {
    Numbers d[DIRS];
};

struct Ahead {
    Slopes slopes[kElements];
    float grad[kElements];
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) back(const __grid_constant__ Pair pair) {
#if DIRS == 1
    const Numbers &p = pair.d[0];
#else
    const Numbers &p = pair.d[blockIdx.y];
#endif
    QG_SHARED(memory);
    unsigned char *const operand = memory;                // [PL][NB][kRow]
    float *const sums = (float *)(memory + PL * kPlane);  // [2][from][U][kPitch]
    uint64_t *const barriers = (uint64_t *)(sums + 2 * kSums);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane8 = lane / 4, quad = lane % 4;
    const int part = warp % KS, group = warp / KS;
    const int rank = CL == 1 ? 0 : (int)cluster_rank();
    const int64_t tile = blockIdx.x / CL;
    const int64_t H = p.H, N = p.N;
    const int T = (int)p.T;

    for (int i = threadIdx.x; i < PL * kPlane / 4; i += kThreads) ((uint32_t *)operand)[i] = 0;
    if (CL > 1 && threadIdx.x == 0) {
        barrier_init(barriers);
        barrier_init(barriers + 1);
    }

    uint32_t w[WP][kLoads * 2][MT][4];
#pragma unroll
    for (int i = 0; i < WP * kLoads * 2 * MT * 4; ++i) {
        const int64_t first = (int64_t)((rank * KS + part) * kGroups + group);
        w[i / (kLoads * 2 * MT * 4)][i / (MT * 4) % (kLoads * 2)][i / 4 % MT][i % 4] =
            p.weights[(first * (WP * kLoads * 2 * MT * 4) + i) * 32 + lane];
    }

    // this thread's elements
    float dh[kElements], scale[kElements][3];
    int64_t at[kElements], grad_at[kElements];
    int length[kElements], put_at[kElements], sums_at[kElements];
    bool kept[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const int i = threadIdx.x + e * kThreads, n = i / U, u = i % U;
        const int64_t unit = rank * U + u, row = tile * NB + n;
        kept[e] = n < NB && unit < H && row < N;
        at[e] = kept[e] ? row * H + unit : 0;
        grad_at[e] = kept[e] ? row * p.stride_n + unit * p.stride_h : 0;
        dh[e] = kept[e] ? p.grad_last[at[e]] : 0.f;
        length[e] = kept[e] && p.lengths ? (int)p.lengths[row] : T;
        put_at[e] = n * kRow + u * 2;
        sums_at[e] = u * kPitch + n;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            scale[e][gate] = kept[e] ? p.scales[gate * H + unit] : 0.f;
    }
    const int first = p.reverse ? 0 : T - 1, step = p.reverse ? 1 : -1;
    const int64_t state = N * H;
    auto load = [&](Ahead &to, int t) {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
            if (kept[e]) {
                to.slopes[e] = p.slopes[t * state + at[e]];
                to.grad[e] = p.grad_out[t * p.stride_t + grad_at[e]];
            }
    };

    if (CL > 1)
        cluster_sync();
    else
        __syncthreads();

    Ahead ahead[2];
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        for (int i = 0; i < 2; ++i) {
            ahead[i].slopes[e] = slopes(0.f, 0.f, 0.f, 0.f);
            ahead[i].grad[e] = 0.f;
        }
    load(ahead[0], first);
    if (T > 1) load(ahead[1], first + step);

    auto advance = [&](int s, int parity, Ahead &ready) {
        const int t = first + s * step;
        float rest[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const float d = t < length[e] ? dh[e] + ready.grad[e] : dh[e];
            if (kept[e]) {
                p.d[t * state + at[e]] = d;
#pragma unroll
                for (int gate = 0; gate < 3; ++gate) {
                    float v = slope(ready.slopes[e], 1 + gate) * scale[e][gate] * d;
#pragma unroll
                    for (int plane = 0; plane < PL; ++plane) {
                        const uint32_t bits = bf16_pair(v, 0.f);
                        *(uint16_t *)(operand + plane * kPlane + put_at[e] + gate * U * 2) =
                            (uint16_t)bits;
                        if (plane + 1 < PL) v -= bits_as_float(bits << 16);
                    }
                }
            }
            rest[e] = slope(ready.slopes[e], 0) * d;
        }
        __syncthreads();
        if (s + 2 < T) load(ready, t + 2 * step);

        float acc[kSets][MT][4];
#pragma unroll
        for (int i = 0; i < kSets * MT * 4; ++i) acc[i / (MT * 4)][i / 4 % MT][i % 4] = 0.f;
        const unsigned char *const from =
            operand + lane8 % NB * kRow + part * kLoads * 64 + quad * 16;
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
#pragma unroll
            for (int plane = PL - 1; plane >= 0; --plane) {
                const uint4 v = *(const uint4 *)(from + plane * kPlane + j * 64);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int wp = 0; wp < WP; ++wp)
                            mma_bf16(acc[(j * 2 + half) % kSets][m], w[wp][j * 2 + half][m],
                                     half ? v.z : v.x, half ? v.w : v.y);
            }

        if (CL > 1 && threadIdx.x == 0) barrier_expect(barriers + parity, kReceived);
        float *const to = sums + parity * kSums + (rank * KS + part) * kPart;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int row8 = 0; row8 < 2; ++row8) {
                float low = acc[0][m][2 * row8], high = acc[0][m][2 * row8 + 1];
#pragma unroll
                for (int set = 1; set < kSets; ++set) {
                    low += acc[set][m][2 * row8];
                    high += acc[set][m][2 * row8 + 1];
                }
                uint2 v;
                v.x = float_bits(low);
                v.y = float_bits(high);
                const int tops = (group * MT + m) * 16 + row8 * 8;
                if (tops >= kUnits || 2 * quad >= kColumns) continue;
                float *const place = to + (tops % U + lane8) * kPitch + 2 * quad;
                if (CL == 1)
                    *(uint2 *)place = v;
                else
                    send(place, barriers + parity, tops / U, v);
            }
        if (CL == 1)
            __syncthreads();
        else
            barrier_wait(barriers + parity, (uint32_t)(s >> 1) & 1);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            if (U * NB % kThreads && !kept[e]) continue;
            float total = rest[e];
#pragma unroll
            for (int i = 0; i < CL * KS; ++i)
                total += sums[parity * kSums + i * kPart + sums_at[e]];
            dh[e] = total;
        }
    };
    for (int s = 0; s < T; s += 2) {
        advance(s, 0, ahead[0]);
        if (s + 1 < T) advance(s + 1, 1, ahead[1]);
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        if (kept[e]) p.dh0[at[e]] = dh[e];
    if (CL > 1) cluster_sync();
}
