// The recurrence of gradients of the states, from the last step to the first, in one launch. A
// cluster of CL blocks processes a tile of NB rows through all steps. A block owns U units and
// computes the gradients of their R h. It multiplies these by its columns of R transposed, which
// stay in registers as the A operand of the mma instruction. It sends each block of the cluster the
// sums of that block's units.
//
//   U        units per block, a multiple of 8
//   CL       blocks per cluster
//   MT, KS   tiles of 16 rows of a warp's product; warps that share its depth
//   KP       depth: 3 * U, padded to a multiple of 32 * KS
//   NB       rows per tile: 1, 2, 4 or 8
//   PL, WP   bfloat16 parts in which gradients and weights are multiplied
//   PACK     sums are sent as bfloat16 (NB == 8, CL > 1)
//   HALF     derivatives are stored in half precision
//   DIRS     directions per launch
#include "backward/backward.cuh"

constexpr int kUnits = U * CL;
constexpr int kGroups = (kUnits + 16 * MT - 1) / (16 * MT);
constexpr int kThreads = kGroups * KS * 32;
constexpr int kLoads = KP / 32 / KS;  // per warp, of 16 bytes per thread
constexpr int kRow = (KP * 2 + 127) / 128 * 128;
constexpr int kPlane = NB * kRow;
// A warp that sends nothing to its own block may still read gradients when other warps begin the
// next step. So the steps of a cluster alternate between two copies. The barrier within each step
// keeps warps from falling further behind.
constexpr int kCopies = CL > 1 ? 2 : 1, kCopy = kCopies > 1 ? PL * kPlane : 0;
constexpr int kColumns = NB == 1 ? 2 : NB;
constexpr int kSumBytes = PACK ? 2 : 4;
constexpr int kPart = U * kColumns * kSumBytes;
constexpr int kSums = CL * KS * kPart;
constexpr int kElements = (U * NB + kThreads - 1) / kThreads;
constexpr int kAhead = kElements == 1 ? 4 : 2;        // steps that are loaded ahead of their use
constexpr int kSets = MT >= 4 ? 1 : MT >= 2 ? 2 : 4;  // independent sums of a tile
constexpr uint32_t kReceived = kSums;

static_assert(!PACK || (NB == 8 && CL > 1), "rows fill 16 bytes");
static_assert(U % 8 == 0 && KP % (32 * KS) == 0 && KP >= 3 * U, "padding");

struct Numbers {
    const uint32_t *weights;  // fragments, [rank][part of the depth][group][plane][step][tile]..
    const Derivatives *derivatives;  // (T, N, H): for the previous state and R h
    const float *scales;             // (3H) of R
    const float *grad_out;           // (T, N, H), strided
    const float *grad_last;          // (N, H), or null for zeros
    const float *nan;                // (N): 0 or NaN, which is added to grad_last; or null
    const int64_t *lengths;          // (N) or null
    float *d;                        // (T, N, H): gradient of each state
    float *dh0;                      // (N, H)
    int64_t T, N, H, reverse;
    int64_t stride_t, stride_n, stride_h;
};
struct Pair {
    Numbers d[DIRS];
};

struct Ahead {
    Derivatives derivatives[kElements];
    float grad[kElements];
};

// The offset of a chunk in row n. Rows have chunks of 16 bytes, whose order depends on the row.
// This avoids bank conflicts when threads write one chunk of all rows, or read four chunks of two
// rows.
inline int chunk_at(int n, int chunk) { return n * kRow + (chunk ^ (n << 2 & 4 | n >> 1)) * 16; }

// The order of elements among threads: kBeside adjacent units of a row, as in global memory, then
// the same units of the next row, as in the sums.
constexpr int kBeside = U % 16 ? 8 : 16;
inline int row_of(int i) { return i / kBeside % NB; }
inline int unit_of(int i) { return i / kBeside / NB * kBeside + i % kBeside; }

// The messages of a thread. Message `i` has sums of one tile of 16 units and of its half `row8`,
// for rows that begin `offset` bytes into a unit's sums.
constexpr int kMessages = PACK ? (MT + 1) / 2 : MT;
struct Message {
    int tile, row8, offset;
    bool sent;
};
inline Message message_of(int i, int quad) {
    Message m;
    m.row8 = quad & 1;
    if (PACK && 2 * i + 1 < MT) {
        m.tile = 2 * i + (quad >> 1);
        m.offset = 0;
    } else {
        m.tile = PACK ? MT - 1 : i;
        m.offset = NB <= 2 ? 0 : (quad >> 1) * (PACK ? 8 : 16);
    }
    m.sent = NB == 8 || quad < 2;
    return m;
}

// Gather rows of a unit in one thread, so that messages are few and large.
template <class Deliver>
inline void hand_over(const float (&sum)[MT][4], int quad, const Deliver &deliver) {
    const bool odd = quad & 1;
    if (PACK) {
        uint2 v[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const uint32_t low = bf16_pair(sum[m][0], sum[m][1]);
            const uint32_t high = bf16_pair(sum[m][2], sum[m][3]);
            const uint32_t other = shuffled(odd ? low : high, 1);
            v[m].x = odd ? other : low;
            v[m].y = odd ? high : other;
        }
        const bool second = quad & 2;
#pragma unroll
        for (int i = 0; i < MT / 2; ++i) {
            const uint2 away = second ? v[2 * i] : v[2 * i + 1];
            const uint2 mine = second ? v[2 * i + 1] : v[2 * i];
            const uint32_t x = shuffled(away.x, 2), y = shuffled(away.y, 2);
            uint4 all;
            all.x = second ? x : mine.x;
            all.y = second ? y : mine.y;
            all.z = second ? mine.x : x;
            all.w = second ? mine.y : y;
            deliver(i, all);
        }
        if (MT % 2) deliver(MT / 2, v[MT - 1]);
        return;
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if (NB <= 2) {
            uint2 v;
            v.x = float_bits(odd ? sum[m][2] : sum[m][0]);
            v.y = float_bits(odd ? sum[m][3] : sum[m][1]);
            deliver(m, v);
        } else {
            uint4 v;
            const uint32_t x = shuffled(float_bits(odd ? sum[m][0] : sum[m][2]), 1);
            const uint32_t y = shuffled(float_bits(odd ? sum[m][1] : sum[m][3]), 1);
            v.x = odd ? x : float_bits(sum[m][0]);
            v.y = odd ? y : float_bits(sum[m][1]);
            v.z = odd ? float_bits(sum[m][2]) : x;
            v.w = odd ? float_bits(sum[m][3]) : y;
            deliver(m, v);
        }
    }
}

inline float sum_at(uint32_t address) {
    return PACK ? bits_as_float(load2(address) << 16) : load_float(address);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) back(const __grid_constant__ Pair pair) {
#if DIRS == 1
    const Numbers &p = pair.d[0];
#else
    const Numbers &p = pair.d[blockIdx.y];
#endif
    QG_SHARED(memory);
    unsigned char *const operand = memory;                       // [kCopies][PL][NB][kRow]
    unsigned char *const sums = memory + kCopies * PL * kPlane;  // [2][from][U][kColumns]
    uint64_t *const barriers = (uint64_t *)(sums + 2 * kSums);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane8 = lane / 4, quad = lane % 4;
    const int part = warp % KS, group = warp / KS;
    const int rank = CL == 1 ? 0 : (int)cluster_rank();
    const int64_t tile = blockIdx.x / CL;
    const int64_t H = p.H, N = p.N;
    const int T = (int)p.T;

    for (int i = threadIdx.x; i < kCopies * PL * kPlane / 4; i += kThreads)
        ((uint32_t *)operand)[i] = 0;
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

    // state of this thread's elements
    const int first = p.reverse ? 0 : T - 1, step = p.reverse ? 1 : -1;
    const int64_t state = N * H, state_step = step * state, grad_step = step * p.stride_t;
    float dh[kElements], scale[kElements][3];
    const Derivatives *derivatives_at[kElements];
    const float *grad_at[kElements];
    float *d_at[kElements];
    int length[kElements];
    uint32_t put_at[kElements][3], sums_at[kElements], keeps = 0;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const int n = row_of(threadIdx.x + e * kThreads), u = unit_of(threadIdx.x + e * kThreads);
        const int64_t unit = rank * U + u, row = tile * NB + n;
        const bool kept = u < U && unit < H && row < N;
        const int64_t at = kept ? row * H + unit : 0;
        keeps |= (uint32_t)kept << e;
        derivatives_at[e] = p.derivatives + first * state + at;
        d_at[e] = p.d + first * state + at;
        grad_at[e] =
            p.grad_out + first * p.stride_t + (kept ? row * p.stride_n + unit * p.stride_h : 0);
        dh[e] = kept && p.grad_last ? p.grad_last[at] : 0.f;
        if (kept && p.nan) dh[e] += p.nan[row];
        length[e] = kept && p.lengths ? (int)p.lengths[row] : T;
        sums_at[e] = pinned(shared_address(sums) + (u * kColumns + n) * kSumBytes);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const int position = gate * U + u;
            put_at[e][gate] =
                pinned(shared_address(operand) + chunk_at(n, position / 8) + position % 8 * 2);
            scale[e][gate] = kept ? p.scales[gate * H + unit] : 0.f;
        }
    }
    keeps = pinned(keeps);
    const auto kept = [&](int e) { return keeps >> e & 1; };
    auto load = [&](Ahead &to) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            if (kept(e)) {
                to.derivatives[e] = *derivatives_at[e];
                to.grad[e] = *grad_at[e];
            }
            derivatives_at[e] += state_step;
            grad_at[e] += grad_step;
        }
    };

    // addresses from which this thread loads gradients (even and odd loads) and to which it sends
    const int row = lane8 % NB, start = part * kLoads;
    const uint32_t read_at[2] = {
        pinned(shared_address(operand) + chunk_at(row, start * 4 + quad)),
        pinned(shared_address(operand) + chunk_at(row, start * 4 + 4 + quad) - 64)};
    uint32_t to[kMessages], arrives[kMessages], sends = 0;
#pragma unroll
    for (int i = 0; i < kMessages; ++i) {
        const Message m = message_of(i, quad);
        const int tops = (group * MT + m.tile) * 16 + m.row8 * 8;
        const bool sent = m.sent && tops < kUnits;
        sends |= (uint32_t)sent << i;
        const uint32_t place = shared_address(sums) + (rank * KS + part) * kPart +
                               (tops % U + lane8) * kColumns * kSumBytes + m.offset;
        const uint32_t peer = sent ? tops / U : 0;
        to[i] = pinned(CL == 1 ? place : address_in(place, peer));
        arrives[i] = CL == 1 ? 0 : pinned(address_in(shared_address(barriers), peer));
    }
    sends = pinned(sends);

    if (CL > 1)
        cluster_sync();
    else
        __syncthreads();

    Ahead ahead[kAhead];
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        for (int i = 0; i < kAhead; ++i) {
            ahead[i].derivatives[e] = derivatives(0.f, 0.f, 0.f, 0.f);
            ahead[i].grad[e] = 0.f;
        }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
        if (T > i) load(ahead[i]);
    float k[kElements][4], grad[kElements];
    auto take = [&](const Ahead &ready, int t) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            k[e][3] = derivative(ready.derivatives[e], 0);
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                k[e][gate] = derivative(ready.derivatives[e], 1 + gate) * scale[e][gate];
            grad[e] = t < length[e] ? ready.grad[e] : 0.f;
        }
    };
    take(ahead[0], first);
    if (T > kAhead) load(ahead[0]);

    auto advance = [&](int s, int parity, Ahead &ready) {
        const int t = first + s * step;
        float rest[kElements], d[kElements];
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            d[e] = dh[e] + grad[e];
            rest[e] = k[e][3] * d[e];
            if (!kept(e)) continue;
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                float v = k[e][gate] * d[e];
#pragma unroll
                for (int plane = 0; plane < PL; ++plane) {
                    const uint32_t bits = bf16_pair(v, 0.f);
                    store2(put_at[e][gate] + parity * kCopy + plane * kPlane, bits);
                    if (plane + 1 < PL) v -= bits_as_float(bits << 16);
                }
            }
        }
        __syncthreads();

        float acc[kSets][MT][4];
#pragma unroll
        for (int i = 0; i < kSets * MT * 4; ++i) acc[i / (MT * 4)][i / 4 % MT][i % 4] = 0.f;
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
#pragma unroll
            for (int plane = PL - 1; plane >= 0; --plane) {
                const uint4 v = load16(read_at[j % 2] + parity * kCopy + plane * kPlane + j * 64);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int m = 0; m < MT; ++m)
#pragma unroll
                        for (int wp = 0; wp < WP; ++wp)
                            mma_bf16(acc[(j * 2 + half) % kSets][m], w[wp][j * 2 + half][m],
                                     half ? v.z : v.x, half ? v.w : v.y);
            }
#pragma unroll
        for (int set = 1; set < kSets; ++set)
#pragma unroll
            for (int i = 0; i < MT * 4; ++i) acc[0][i / 4][i % 4] += acc[set][i / 4][i % 4];

        if (CL > 1 && threadIdx.x == 0) barrier_expect(barriers + parity, kReceived);
        hand_over(acc[0], quad, [&](int i, auto v) {
            if (!(sends >> i & 1)) return;
            if (CL == 1)
                store(to[i] + parity * kSums, v);
            else
                send_to(to[i] + parity * kSums, arrives[i] + parity * 8, v);
        });

        // overlaps with the transfer of sums
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            if (kept(e)) *d_at[e] = d[e];
            d_at[e] += state_step;
        }
        if (s + 1 < T) take(ready, t + step);
        if (s + 1 + kAhead < T) load(ready);
        if (CL == 1)
            __syncthreads();
        else
            barrier_wait(barriers + parity, (uint32_t)(s >> 1) & 1);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            if (!kept(e)) continue;
            float total[2] = {rest[e], 0.f};
#pragma unroll
            for (int i = 0; i < CL * KS; ++i)
                total[i % 2] += sum_at(sums_at[e] + parity * kSums + i * kPart);
            dh[e] = total[0] + total[1];
        }
    };
    for (int s = 0; s < T; s += kAhead)
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (s + i < T) advance(s + i, i & 1, ahead[(i + 1) % kAhead]);
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        if (kept(e)) {
            const int i = threadIdx.x + e * kThreads;
            p.dh0[(tile * NB + row_of(i)) * H + rank * U + unit_of(i)] = dh[e];
        }
    if (CL > 1) cluster_sync();
}
