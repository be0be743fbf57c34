// The recurrence of a whole sequence in one launch. A cluster of CL blocks takes a tile of NB rows
// through time; a block owns all three gates of UP / CL units. Weights stay in registers as the A
// operand of the matrix instruction, the state of all units lies in every block's shared memory.
//
// Structure comes in as macros, numbers as arguments:
//   KP, UP      features and units, padded to multiples of 64 * KS and of 16 * CL
//   CL, KS      blocks of a cluster, warps that share the features of a group of 16 units
//   SPREAD      warps that repeat the products of a group and divide its rows (KS == 1, NB > 1)
//   NB          rows of a tile: 1, 2, 4 or 8
//   HP, WP      bytes of a state code and of a weight
//   WX          bytes of a stored input projection
//   OUT         bytes of a state code at the interface
//   REAL        float or double; QG_WORDS: some sums need 64-bit integers
//   TZ, TR, TG  how the tables are read: 0, 1 or 2, see Reader
//   COPY        bytes of states that a thread writes at once behind the products, 0: each its own
//   DIRS        directions of a launch
//   HELD        some units keep their state in some steps
//   QG_RRH, QG_OLD, QG_NEW: products that are rounded to their own codes
//   QG_ZONEOUT  states keep a share of what they were
#include "cell.cuh"
#include "ptx.cuh"

#ifndef HELD
#define HELD 0
#endif

constexpr int kHalves = KS * SPREAD;  // warps of a group of 16 units
constexpr int kGroups = UP / CL / 16;
constexpr int kThreads = kGroups * kHalves * 32;
constexpr int kBlocks = KP / 64 / KS;  // 64 features each, of one warp
constexpr int kStride = ((KP > UP ? KP : UP) + 127) / 128 * 128 + 64;  // free of bank conflicts
constexpr int kPlane = NB * kStride;
constexpr int kState = HP * kPlane;
constexpr int kSets = HP + WP - 1;  // accumulators of one weight: by powers of 256
constexpr int kElements = kHalves == 2 ? (NB == 8 ? 2 : 1) : (NB == 8 ? 4 : NB == 4 ? 2 : 1);
constexpr int kRows = NB == 8 ? 2 : 1;              // units of a thread
constexpr int kOwned = NB == 1 ? 1 : NB / kHalves;  // rows of the tile that a warp finishes
constexpr int kStage = HP * kOwned * 16;            // bytes of 16 units: what a warp sends
constexpr int kExchange = KS == 2 ? 2 * kGroups * 2 * kSets * 3 * kElements * 32 : 0;
constexpr uint32_t kReceived = HP * NB * UP;
constexpr int kCopied = COPY ? COPY / HP : 16;  // units of a copy
constexpr int kUnits = UP / CL;

static_assert(KP % (64 * KS) == 0 && UP % (16 * CL) == 0, "padding");
static_assert(kHalves <= 2 && (NB == 1 || NB == 2 || NB == 4 || NB == 8), "shape");
static_assert(KS == 1 || kGroups < 16, "a named barrier for each group");
static_assert(SPREAD == 1 || NB > 1, "rows are what is spread");

#if WX == 1
typedef uint32_t Stored;  // bytes: update, reset, candidate
#else
typedef uint2 Stored;  // 16 bits each
#endif
#if OUT == 1
typedef uint8_t Code;
#elif OUT == 2
typedef uint16_t Code;
#else
typedef int32_t Code;
#endif
typedef REAL Real;

struct Numbers {
    Sequence s;
    const uint32_t *weights;  // fragments, [plane][group][block of 64][half][gate][register][lane]
    const Stored *Wx;         // [t][tile][group][16 * NB]
    const double *bias;       // (3, UP): bias and zero point, in accumulator units
    const double *m;          // (3, UP): M / 2^k
    const int32_t *exact_float;  // whether float holds every accumulator and multiplier
    Cell<Real> cell;
};
struct Pair {
    Numbers d[DIRS];
};

// Which elements a thread has: unit 8 * row8 + lane / 4 of its group, row n of the tile, standing
// in register `slot` of its warp's accumulators. Of two warps, one has the even rows and the other
// the odd ones; columns of the product repeat the rows of a small tile.
struct Place {
    int row8, n, slot;
};

inline Place place_of(int e, int quad, int half) {
    Place p;
    int column;  // of the two that a thread's registers hold
    if (kHalves == 1) {
        p.row8 = NB == 8 ? e & 1 : NB == 4 ? quad >> 1 : quad & 1;
        column = NB == 8 ? e >> 1 : NB == 4 ? e : NB == 2 ? quad >> 1 : 0;
    } else {
        p.row8 = NB == 8 ? e : NB == 4 ? quad >> 1 : quad & 1;
        column = NB == 1 ? 0 : half;
    }
    p.n = (NB == 8 ? 2 * quad : NB == 4 ? 2 * (quad & 1) : 0) + column;
    p.slot = 2 * p.row8 + column;
    return p;
}

inline bool works(int quad, int half) {
    if (NB == 1) return quad < 2 && half == 0;
    if (NB == 2 && kHalves == 2) return quad < 2;
    return true;
}

inline int pick(const int (&a)[4], int slot) {
    const int low = slot & 1 ? a[1] : a[0], high = slot & 1 ? a[3] : a[2];
    return slot & 2 ? high : low;
}

struct Words {
    Stored w[kElements];
#if HELD
    uint8_t held[kElements];
#endif
};

inline void load_words(Words &to, const Stored *from) {
#if WX == 1
    if (kElements == 4) {
        const uint4 v = *(const uint4 *)from;
        to.w[0] = v.x;
        to.w[1 % kElements] = v.y;
        to.w[2 % kElements] = v.z;
        to.w[3 % kElements] = v.w;
        return;
    }
    if (kElements == 2) {
        const uint2 v = *(const uint2 *)from;
        to.w[0] = v.x;
        to.w[1 % kElements] = v.y;
        return;
    }
    to.w[0] = *from;
#else
#pragma unroll
    for (int e = 0; e < kElements; ++e) to.w[e] = from[e];
#endif
}

inline Real unpacked(const Stored &w, int gate, Real offset) {
#if WX == 1
    return (Real)(byte_as_float(w, gate) - (8388608.f + (float)offset));
#else
    const uint32_t word = gate == 2 ? w.y : w.x;
    return (Real)(half_as_float(word, gate == 1 ? 2 : 0) - 8388608.f) - offset;
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    recurrent(const __grid_constant__ Pair pair) {
    follow_previous();
#if DIRS == 1
    const Numbers &p = pair.d[0];
#else
    const Numbers &p = pair.d[blockIdx.y];
#endif
    typedef Magic<Real> R;
    QG_SHARED(memory);
    unsigned char *const state = memory;                 // [2][HP][NB][kStride]
    int *const exchange = (int *)(memory + 2 * kState);  // [2][group][half][..][lane]
    unsigned char *const stages = (unsigned char *)(exchange + kExchange);
    uint64_t *const barriers = (uint64_t *)(stages + (CL > 1 ? 2 * kGroups * kHalves * kStage : 0));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane8 = lane / 4, quad = lane % 4;
    const int half = warp % kHalves, local = warp / kHalves;
    const int part = KS == 2 ? half : 0;
    const int rank = CL == 1 ? 0 : (int)cluster_rank();
    const int tile = (int)(blockIdx.x / CL), tiles = (int)(gridDim.x / CL);
    const int group = rank * kGroups + local, groups = UP / 16;
    const int64_t H = p.s.H, N = p.s.N, T = p.s.T;
    const int64_t first_row = (int64_t)tile * NB;

    // the state before the first step, as bytes, and the tables
    for (int i = threadIdx.x; i < kPlane; i += kThreads) {
        const int n = i / kStride, k = i % kStride;
        int code = 0;
        if (k < H && first_row + n < N)
            code = (int)(first_code(p.s, (first_row + n) * H + k, p.cell.h_zero) - p.cell.h_offset);
        state[i] = (unsigned char)code;
        if (HP == 2) {
            state[kPlane + i] = (unsigned char)(code >> 8);
            state[kState + kPlane + i] = 0;
        }
        state[kState + i] = 0;
    }
    Reader<TZ> z_of;
    Reader<TR> r_of;
    Reader<TG> g_of;
    g_of.open(p.cell.g, r_of.open(p.cell.r, z_of.open(p.cell.z, (unsigned char *)(barriers + 2))));
    if (CL > 1 && threadIdx.x == 0) {
        barrier_init(barriers);
        barrier_init(barriers + 1);
    }

    // this warp's weights
    uint32_t w[WP][kBlocks][2][3][4];
#pragma unroll
    for (int plane = 0; plane < WP; ++plane)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < 24; ++i) {
                const int block = (plane * groups + group) * (KP / 64) + part * kBlocks + b;
                w[plane][b][i / 12][i / 4 % 3][i % 4] = p.weights[(block * 24 + i) * 32 + lane];
            }

    // this thread's elements
    const bool exact_float = sizeof(Real) == 4 && *p.exact_float != 0;
    int bias[kRows][3];
    Real wide_bias[kRows][3], m[kRows][3];
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const int unit = group * 16 + lane8 + 8 * place_of(row, quad, half).row8;
            const double b = p.bias[gate * UP + unit];
            bias[row][gate] = kSets == 1 ? (int)b : 0;
            wide_bias[row][gate] = kSets == 1 ? (Real)0 : (Real)b;
            m[row][gate] = (Real)p.m[gate * UP + unit];
        }
    Real h[kElements];  // magic number added
    bool kept[kElements];
    int64_t at[kElements];
    int byte_at[kElements], length[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const Place place = place_of(e, quad, half);
        const int unit = group * 16 + lane8 + 8 * place.row8;
        const int64_t row = first_row + place.n;
        kept[e] = unit < H && row < N && works(quad, half);
        at[e] = row * H + unit;
        const int code = kept[e] ? (int)(first_code(p.s, at[e], p.cell.h_zero) - p.cell.h_zero) : 0;
        h[e] = R::plus((Real)code, R::number());
        length[e] = (int)(kept[e] && p.s.lengths ? p.s.lengths[row] : T);
        byte_at[e] = CL == 1 ? place.n * kStride + unit
                             : place.n / (NB == 1 ? 1 : kHalves) * 16 + lane8 + 8 * place.row8;
    }
    const int64_t step = p.s.reverse ? -1 : 1, first = p.s.reverse ? T - 1 : 0;
    const int64_t stride = (int64_t)tiles * groups * 16 * NB;
    const Place mine = place_of(0, quad, half);
    const Stored *const stored = p.Wx + ((int64_t)tile * groups + group) * 16 * NB +
                                 (works(quad, half) ? stored_at(NB, lane8, mine.row8, mine.n) : 0);
    Code *const out = (Code *)p.s.out;
    const int h_zero = (int)p.cell.h_zero, raw = (int)(p.cell.h_zero - p.cell.h_offset);
    unsigned char *const stage = stages + warp * kStage;

    // what this thread copies from the state to the output
    const int copy_row = threadIdx.x / (kUnits / kCopied);
    const int copy_unit = rank * kUnits + threadIdx.x % (kUnits / kCopied) * kCopied;
    const bool copies = COPY && copy_row < NB && copy_unit < H && first_row + copy_row < N;
    const unsigned char *const copied = state + copy_row * kStride + copy_unit;
    const uint32_t flip = p.cell.h_offset ? 0x80808080u : 0;
    const int64_t out_step = step * N * H;
    Code *copied_to = out + (first * N + first_row + copy_row) * H + copy_unit;
    auto copy_load = [&](int parity) {
        const unsigned char *const from = copied + parity * kState;
        uint4 v = {0, 0, 0, 0};
#if COPY == 16 && HP == 1
        v = *(const uint4 *)from;
#elif COPY == 16
        const uint2 low = *(const uint2 *)from, high = *(const uint2 *)(from + kPlane);
        v.x = low.x;
        v.y = low.y;
        v.z = high.x;
        v.w = high.y;
#elif COPY == 4
        v.x = *(const uint32_t *)from;
#endif
        return v;
    };
    auto copy_store = [&](uint4 v) {
#if COPY == 16 && HP == 1
        v.x ^= flip;
        v.y ^= flip;
        v.z ^= flip;
        v.w ^= flip;
        *(uint4 *)copied_to = v;
#elif COPY == 16
        v.z ^= flip;
        v.w ^= flip;
        uint4 both;
        both.x = interleave(v.x, v.z, 0);
        both.y = interleave(v.x, v.z, 2);
        both.z = interleave(v.y, v.w, 0);
        both.w = interleave(v.y, v.w, 2);
        *(uint4 *)copied_to = both;
#elif COPY == 4
        *(uint32_t *)copied_to = v.x ^ flip;
#endif
        copied_to += out_step;
    };

    if (CL > 1)
        cluster_sync();
    else
        __syncthreads();

    const auto load_held = [&](Words &to, int64_t t) {
#if HELD
#pragma unroll
        for (int e = 0; e < kElements; ++e) to.held[e] = kept[e] && p.s.held[t * N * H + at[e]];
#endif
    };
    Words words[2];
    const Stored *ahead = stored + first * stride;
    const int64_t ahead_step = step * stride;
    load_words(words[0], ahead);
    load_held(words[0], first);
    ahead += ahead_step;
    if (T > 1) load_words(words[1], ahead);
    if (T > 1) load_held(words[1], first + step);
    ahead += ahead_step;
    const int steps = (int)T;
    int t = (int)first;
    Code *written = out + first * N * H;

    auto advance = [&](int s, int parity, Words &ready) {
        const bool copies_now = copies && s;
        uint4 old_states = {0, 0, 0, 0};
        if (copies_now) old_states = copy_load(parity);
        const Words Wx = ready;
        if (s + 2 < steps) load_words(ready, ahead);
        if (s + 2 < steps) load_held(ready, t + 2 * step);
        ahead += ahead_step;

        int acc[kSets][3][4];
#pragma unroll
        for (int i = 0; i < kSets * 12; ++i) acc[i / 12][i / 4 % 3][i % 4] = 0;
        const unsigned char *const operand =
            state + parity * kState + lane8 % NB * kStride + part * kBlocks * 64 + quad * 16;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            uint32_t f[HP][4];
#pragma unroll
            for (int plane = 0; plane < HP; ++plane) {
                const uint4 v = *(const uint4 *)(operand + plane * kPlane + b * 64);
                f[plane][0] = v.x;
                f[plane][1] = v.y;
                f[plane][2] = v.z;
                f[plane][3] = v.w;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate) {
                    mma<WP == 2, HP == 2>(acc[0][gate], w[0][b][j][gate], f[0][2 * j],
                                          f[0][2 * j + 1]);
                    if (HP == 2)
                        mma<WP == 2, false>(acc[1 % kSets][gate], w[0][b][j][gate],
                                            f[HP - 1][2 * j], f[HP - 1][2 * j + 1]);
                    if (WP == 2)
                        mma<false, HP == 2>(acc[1 % kSets][gate], w[WP - 1][b][j][gate],
                                            f[0][2 * j], f[0][2 * j + 1]);
                    if (WP == 2 && HP == 2)
                        mma<false, false>(acc[kSets - 1][gate], w[WP - 1][b][j][gate],
                                          f[HP - 1][2 * j], f[HP - 1][2 * j + 1]);
                }
        }

        if (CL > 1 && threadIdx.x == 0) barrier_expect(barriers + (1 - parity), kReceived);
        if (copies_now) copy_store(old_states);

        // sums of this thread's elements
        int sum[kSets][3][kElements];
#pragma unroll
        for (int set = 0; set < kSets; ++set)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                for (int e = 0; e < kElements; ++e)
                    sum[set][gate][e] = pick(acc[set][gate], place_of(e, quad, half).slot);
        if (KS == 2) {
            const int base = (parity * kGroups + local) * 2;
            const int count = kSets * 3 * kElements * 32;
            int *const to = exchange + (base + half) * count + lane;
            const int *const from = exchange + (base + 1 - half) * count + lane;
#pragma unroll
            for (int set = 0; set < kSets; ++set)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        to[((set * 3 + gate) * kElements + e) * 32] =
                            pick(acc[set][gate], place_of(e, quad, 1 - half).slot);
            sync_threads(1 + local, 64);
#pragma unroll
            for (int set = 0; set < kSets; ++set)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        sum[set][gate][e] += from[((set * 3 + gate) * kElements + e) * 32];
        }

        // zero-point-free codes of R h
        Real Rh[3][kElements];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int row = kRows == 2 ? e & 1 : 0;
                Real v;
                if (kSets == 1)
                    v = (Real)(sum[0][gate][e] + bias[row][gate]);
                else {
                    v = R::fma((Real)sum[1 % kSets][gate][e], (Real)256, wide_bias[row][gate]);
                    v = R::plus(v, (Real)sum[0][gate][e]);
                    if (kSets == 3) v = R::fma((Real)sum[kSets - 1][gate][e], (Real)65536, v);
                }
                Rh[gate][e] = round_term(v, m[row][gate]);
            }
        if (__builtin_expect(sizeof(Real) == 4 && !exact_float, 0)) {
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int row = kRows == 2 ? e & 1 : 0;
                    const int unit = group * 16 + lane8 + 8 * place_of(e, quad, half).row8;
                    const double v = round_term((double)(sum[0][gate][e] + bias[row][gate]),
                                                p.m[gate * UP + unit]);
                    const double low = (double)p.cell.Rh_lo - (double)R::number();
                    const double high = (double)p.cell.Rh_hi - (double)R::number();
                    Rh[gate][e] =
                        (Real)(Magic<double>::limit(plain(v), low, high) + (double)R::number());
                }
        }

        unsigned char *const next = state + (1 - parity) * kState;
        unsigned char *const to = CL == 1 ? next : stage + parity * (kGroups * kHalves * kStage);
        // all results before any store: a store of bytes could be to anything that is read
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            Real Rh_e[3], Wx_e[3];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                Rh_e[gate] = plain(R::limit(Rh[gate][e], p.cell.Rh_lo, p.cell.Rh_hi));
                Wx_e[gate] = unpacked(Wx.w[e], gate, p.cell.Wx_offset);
            }
            Real moved = next_state<Real>(p.cell, z_of, r_of, g_of, Wx_e[0], Wx_e[1], Wx_e[2],
                                          Rh_e[0], Rh_e[1], Rh_e[2], plain(h[e]));
#if QG_ZONEOUT
            moved = weighted(p.cell.zoneout, plain(h[e]), plain(moved));
#endif
#if HELD
            if (Wx.held[e]) continue;
#endif
            if (t < length[e]) h[e] = moved;
        }
        if (works(quad, half)) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int code = R::integer(h[e]) + raw;
                to[byte_at[e]] = (unsigned char)code;
                if (HP == 2)
                    to[(CL == 1 ? kPlane : kOwned * 16) + byte_at[e]] = (unsigned char)(code >> 8);
            }
        }
        if (!COPY) {
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (kept[e]) written[at[e]] = (Code)(R::integer(h[e]) + h_zero);
            written += out_step;
        }
        t += (int)step;
        if (CL == 1) {
            __syncthreads();
            return;
        }
        __syncwarp();
        if (NB > 1 || half == 0) {
#pragma unroll
            for (int i = lane; i < HP * kOwned * CL; i += 32) {
                const int chunk = i % (HP * kOwned), peer = i / (HP * kOwned);
                const int n = chunk % kOwned * (NB == 1 ? 1 : kHalves) + (NB == 1 ? 0 : half);
                send(next + chunk / kOwned * kPlane + n * kStride + group * 16,
                     barriers + (1 - parity), peer, *(const uint4 *)(to + chunk * 16));
            }
        }
        barrier_wait(barriers + (1 - parity), (uint32_t)(s >> 1) & 1);
    };
    for (int s = 0; s < steps; s += 2) {
        advance(s, 0, words[0]);
        if (s + 1 < steps) advance(s + 1, 1, words[1]);
    }
    if (copies) copy_store(copy_load(steps & 1));
#pragma unroll
    for (int e = 0; e < kElements; ++e)
        if (kept[e]) ((Code *)p.s.last)[at[e]] = (Code)(R::integer(h[e]) + h_zero);
    if (CL > 1) cluster_sync();
}
