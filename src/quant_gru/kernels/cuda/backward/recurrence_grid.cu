// The recurrence of gradients of the states, from the last step to the first, in one cooperative
// launch. It is for weights that do not fit the registers of a cluster, but fit those of a whole
// GPU. A cluster of CL blocks computes the gradients of some units and rows. Its blocks and their
// warps share the depth of the product. Each has its part of R transposed in registers and, if they
// do not suffice, in shared memory.
//
// Every block needs the gradients of R h of all units. They are exchanged through dRh, which is
// filled with kAbsent before the launch. A word that is not kAbsent has its final value, so each
// word signals its own arrival. Words may arrive in any order, and nothing else is exchanged
// through global memory. So no barrier or fence is needed.
//
//   CL             blocks per cluster
//   MT, NT         tiles of 16 units and of 8 rows per block
//   WARPS          warps per block
//   LOADS, PARKED  loads by which a warp reads its part of the depth, 32 * LOADS gradients, with 16
//                  bytes per thread; number of last loads whose weights are in shared memory
//   CHUNK, AHEAD   loads of a row that are checked at once; checks by which loads run ahead
//   OPERAND == 0, HALF: see operands.cu
#include "backward/backward.cuh"

constexpr int kThreads = WARPS * 32;
constexpr int kUnits = 16 * MT, kRows = 8 * NT;
constexpr int kHeld = LOADS - PARKED;
constexpr int kChunks = LOADS / CHUNK;
constexpr int kStride = kUnits + 4;  // rows of sums begin in different banks
constexpr int kPairs = kUnits * kRows / 2;
constexpr int kOwned = kPairs / CL;
constexpr int kElements = (kOwned + kThreads - 1) / kThreads;
constexpr int kRounds = (kPairs + kThreads - 1) / kThreads;
constexpr int kSums = WARPS * kRows * kStride;
constexpr uint32_t kAbsent = 0xFFFFFFFFu;  // never written: a NaN rounds to 0x7FFF

static_assert(LOADS % CHUNK == 0 && PARKED <= LOADS && kPairs % CL == 0, "whole parts");

struct Numbers {
    const uint32_t *weights;  // fragments: [part of the depth][units][step][tile][register][lane]
    const Derivatives *derivatives;  // (T, N, H)
    const float *grad_out;           // (T, N, H), strided
    const float *grad_last;          // (N, H), or null for zeros
    const float *nan;                // (N): 0 or NaN, which is added to grad_last; or null
    const int64_t *lengths;          // (N) or null
    float *d;                        // (T, N, H)
    float *dh0;                      // (N, H)
    Operand *dRh;                    // (T, N, 3H), times scale
    int64_t T, N, H, reverse;
    int64_t stride_t, stride_n, stride_h;
    float scale;
};

struct alignas(8) Two {
    float of[2];
};
struct alignas(2 * sizeof(Derivatives)) DerivativesOfTwo {
    Derivatives of[2];
};
struct Ahead {
    DerivativesOfTwo derivatives;
    float grad[2];
};

inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    back_grid(const __grid_constant__ Numbers p) {
    QG_SHARED(memory);
    uint4 *const parked = (uint4 *)memory;  // [PARKED * 2][MT][kThreads]
    float *const sums = (float *)(parked + PARKED * 2 * MT * kThreads);  // [2][WARPS][n][unit]
    float *const received = sums + 2 * kSums;                            // [2][from][kOwned][2]
    uint64_t *const barriers = (uint64_t *)(received + (CL > 1 ? 2 * CL * kOwned * 2 : 0));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane8 = lane / 4, quad = lane % 4;
    const int rank = CL == 1 ? 0 : (int)cluster_rank();
    const int group = (int)(blockIdx.x / CL), groups = (int)(gridDim.x / CL);
    const int64_t H = p.H, N = p.N, first_row = (int64_t)blockIdx.y * kRows;
    const int T = (int)p.T;

    if (CL > 1 && threadIdx.x == 0) {
        barrier_init(barriers);
        barrier_init(barriers + 1);
    }
    uint32_t w[kHeld ? kHeld * 2 : 1][MT][4];
    const int part = rank * WARPS + warp;
    const uint32_t *const weights =
        p.weights + ((int64_t)part * groups + group) * (LOADS * 2 * MT * 4 * 32) + lane;
#pragma unroll
    for (int i = 0; i < kHeld * 2 * MT * 4; ++i)
        w[i / (MT * 4)][i / 4 % MT][i % 4] = weights[i * 32];
    for (int i = 0; i < PARKED * 2 * MT; ++i) {
        const uint32_t *const from = weights + (kHeld * 2 * MT + i) * 4 * 32;
        uint4 v;
        v.x = from[0];
        v.y = from[32];
        v.z = from[64];
        v.w = from[96];
        parked[i * kThreads + threadIdx.x] = v;
    }
    const uint32_t parked_at = pinned(shared_address(parked + threadIdx.x));

    // this thread's elements: two units of a row
    const int first = p.reverse ? 0 : T - 1, step = p.reverse ? 1 : -1;
    const int64_t state_step = step * N * H, grad_step = step * p.stride_t;
    float dh[kElements][2];
    Ahead ahead[kElements];
    const DerivativesOfTwo *derivatives_at[kElements];
    const float *grad_at[kElements];
    float *d_at[kElements];
    Operand *to[kElements];
    int length[kElements];
    bool kept[kElements];
    const auto load = [&](int e) {
        if (kept[e]) {
            ahead[e].derivatives = *derivatives_at[e];
            ahead[e].grad[0] = grad_at[e][0];
            ahead[e].grad[1] = grad_at[e][p.stride_h];
        }
        derivatives_at[e] =
            (const DerivativesOfTwo *)((const Derivatives *)derivatives_at[e] + state_step);
        grad_at[e] += grad_step;
    };
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const int own = threadIdx.x + e * kThreads, pair = rank * kOwned + own;
        const int64_t unit = group * kUnits + pair % (kUnits / 2) * 2;
        const int64_t row = first_row + pair / (kUnits / 2);
        kept[e] = own < kOwned && unit < H && row < N;
        const int64_t at = kept[e] ? row * H + unit : 0, start = first * N * H + at;
        derivatives_at[e] = (const DerivativesOfTwo *)(p.derivatives + start);
        d_at[e] = p.d + start;
        to[e] = p.dRh + (first * N + (kept[e] ? row : 0)) * 3 * H + (kept[e] ? unit : 0);
        grad_at[e] =
            p.grad_out + first * p.stride_t + (kept[e] ? row * p.stride_n + unit * p.stride_h : 0);
        length[e] = kept[e] && p.lengths ? (int)p.lengths[row] : T;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            dh[e][i] = kept[e] && p.grad_last ? p.grad_last[at + i] : 0.f;
            if (kept[e] && p.nan) dh[e][i] += p.nan[row];
            ahead[e].derivatives.of[i] = derivatives(0.f, 0.f, 0.f, 0.f);
            ahead[e].grad[i] = 0.f;
        }
        load(e);
    }

    // the address from which this thread loads gradients, and the loads that exist per row
    const int64_t depth = (int64_t)part * LOADS * 32 + quad * 8;
    const int64_t there = 3 * H > depth ? (3 * H - depth + 31) / 32 : 0;
    const Operand *from = p.dRh + (first * N + first_row + lane8) * 3 * H + depth;
    const int64_t below = 8 * 3 * H;
    int loads[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n)
        loads[n] = first_row + n * 8 + lane8 < N ? (int)(there < LOADS ? there : LOADS) : 0;

    if (CL > 1)
        cluster_sync();
    else
        __syncthreads();

    for (int s = 0; s < T; ++s) {
        const int t = first + s * step, parity = s & 1;
        float rest[kElements][2];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            Two d;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                d.of[i] = dh[e][i] + (t < length[e] ? ahead[e].grad[i] : 0.f);
                rest[e][i] = derivative(ahead[e].derivatives.of[i], 0) * d.of[i];
            }
            if (kept[e]) {
#pragma unroll
                for (int gate = 0; gate < 3; ++gate) {
                    uint32_t *const word = (uint32_t *)(to[e] + reordered(gate, 0, H));
                    store_relaxed(word, bf16_pair(derivative(ahead[e].derivatives.of[0], 1 + gate) *
                                                      d.of[0] * p.scale,
                                                  derivative(ahead[e].derivatives.of[1], 1 + gate) *
                                                      d.of[1] * p.scale));
                    // cache the line of a later step, so that polling it does not go to DRAM
                    if (s + 2 < T) prefetch((Operand *)word + 6 * state_step);
                }
                *(Two *)d_at[e] = d;
            }
            to[e] += 3 * state_step;
            d_at[e] += state_step;
            if (s + 1 < T) load(e);
        }

        uint4 v[kChunks][CHUNK][NT];
        const auto issue = [&](int c) {
#pragma unroll
            for (int j = 0; j < CHUNK; ++j)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    v[c][j][n] = uint4{0, 0, 0, 0};
                    if (c * CHUNK + j < loads[n])
                        v[c][j][n] = load_relaxed(from + n * below + (c * CHUNK + j) * 32);
                }
        };
        const auto absent = [&](int c) {
            uint32_t most = 0;
#pragma unroll
            for (int j = 0; j < CHUNK; ++j)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const uint4 &u = v[c][j][n];
                    most = larger(most, larger(larger(u.x, u.y), larger(u.z, u.w)));
                }
            return any_lane(most == kAbsent);
        };
        float acc[MT][NT][4];
#pragma unroll
        for (int i = 0; i < MT * NT * 4; ++i) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.f;
        // poll with few loads for the gradients of other blocks; later chunks have then likely
        // arrived
        do issue(0);
        while (absent(0));
#pragma unroll
        for (int c = 1; c < kChunks && c <= AHEAD; ++c) issue(c);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (c)
                while (absent(c)) issue(c);
#pragma unroll
            for (int j = 0; j < CHUNK * 2; ++j) {
                const int at = c * CHUNK * 2 + j;
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    uint32_t a[4];
                    if (at < kHeld * 2) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[i] = w[at < kHeld * 2 ? at : 0][m][i];
                    } else {
                        const uint4 u =
                            load16(parked_at + ((at - kHeld * 2) * MT + m) * kThreads * 16);
                        a[0] = u.x;
                        a[1] = u.y;
                        a[2] = u.z;
                        a[3] = u.w;
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const uint4 &b = v[c][j / 2][n];
                        mma_bf16(acc[m][n], a, j % 2 ? b.z : b.x, j % 2 ? b.w : b.y);
                    }
                }
            }
            if (c + 1 + AHEAD < kChunks) issue(c + 1 + AHEAD);
        }
        from += 3 * state_step;

        float *const mine = sums + (parity * WARPS + warp) * (kRows * kStride);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    mine[(n * 8 + quad * 2 + i % 2) * kStride + m * 16 + i / 2 * 8 + lane8] =
                        acc[m][n][i];
        if (CL > 1 && threadIdx.x == 0) barrier_expect(barriers + parity, CL * kOwned * 8);
        __syncthreads();

        const auto sum_of = [&](int pair) {
            const float *const at =
                sums + parity * kSums + pair / (kUnits / 2) * kStride + pair % (kUnits / 2) * 2;
            Two total = *(const Two *)at;
#pragma unroll
            for (int i = 1; i < WARPS; ++i) {
                const Two more = *(const Two *)(at + i * (kRows * kStride));
                total.of[0] += more.of[0];
                total.of[1] += more.of[1];
            }
            return total;
        };
        if (CL == 1) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                if (!kept[e]) continue;
                const Two total = sum_of(threadIdx.x + e * kThreads);
                dh[e][0] = rest[e][0] + total.of[0];
                dh[e][1] = rest[e][1] + total.of[1];
            }
            continue;
        }
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
            // the block's own pairs come last, since those of other blocks take longer to send
            const int i = threadIdx.x + r * kThreads;
            const int pair = (i + (rank + 1) * kOwned) % kPairs, owner = pair / kOwned;
            if (i >= kPairs) continue;
            const Two total = sum_of(pair);
            float *const place = received + ((parity * CL + rank) * kOwned + pair % kOwned) * 2;
            uint2 both;
            both.x = float_bits(total.of[0]);
            both.y = float_bits(total.of[1]);
            send_to(address_in(shared_address(place), owner),
                    address_in(shared_address(barriers + parity), owner), both);
        }
        barrier_wait(barriers + parity, (uint32_t)(s >> 1) & 1);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            if (!kept[e]) continue;
            const float *const at =
                received + (parity * CL * kOwned + (int)threadIdx.x + e * kThreads) * 2;
            Two total = *(const Two *)at;
#pragma unroll
            for (int i = 1; i < CL; ++i) {
                const Two more = *(const Two *)(at + i * kOwned * 2);
                total.of[0] += more.of[0];
                total.of[1] += more.of[1];
            }
            dh[e][0] = rest[e][0] + total.of[0];
            dh[e][1] = rest[e][1] + total.of[1];
        }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        if (!kept[e]) continue;
        const int pair = rank * kOwned + (int)threadIdx.x + e * kThreads;
        Two last;
        last.of[0] = dh[e][0];
        last.of[1] = dh[e][1];
        *(Two *)(p.dh0 + (first_row + pair / (kUnits / 2)) * H + group * kUnits +
                 pair % (kUnits / 2) * 2) = last;
    }
    if (CL > 1) cluster_sync();
}
