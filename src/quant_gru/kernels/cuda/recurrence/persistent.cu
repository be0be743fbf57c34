// The recurrence of a whole sequence in one launch. A cluster of CL blocks takes a tile of NB rows
// through time; a block owns all three gates of UP / CL units. Weights stay in registers as the A
// operand of the matrix instruction, the state of all units lies in every block's shared memory.
//
// Structure comes in as macros, numbers as arguments:
//   KP, UP      features and units, padded to multiples of 64 * KS and of 16 * CL
//   CL, KS      blocks of a cluster, warps that share the features of a group of 16 units
//   SPREAD      warps that repeat the products of a group and divide its rows (KS == 1, NB > 1)
//   NB          rows of a strip: 1, 2, 4 or 8
//   NT          strips of a tile, 1 or 2: two take turns, so that the states of one are on their
//               way while the other is worked on
//   HP, WP      bytes of a state code and of a weight
//   WX          bytes of a stored input projection
//   OUT         bytes of a state code at the interface
//   REAL        float or double; QG_WORDS: some sums need 64-bit integers
//   QG_POT      float: multipliers of products are powers of two
//   TZ, TR, TG  how the tables are read: 0, 1 or 2, see Reader, or 3, see Lines
//   COPY        bytes of states that a thread writes at once behind the products, 0: each its own
//   BULK        a block sends its states of a strip, of 64 units, to each other in one piece
//   DIRS        directions of a launch
//   RING        steps whose input projection is on its way or in use: a power of two
//   SATURATED   gates as of saturated.cuh: codes of 8 bits, multipliers that are powers of two
//   LATE        products of the update gate come behind the others
//   TIGHT       biases and multipliers stand in shared memory: weights leave few registers
//   SETS        accumulators of a gate, added up behind the products (one product of a weight)
//   STRETCH     steps whose input projection is waited for at once, while it goes on with others: a
//               power of two, or 0 where all of it is there before the first step
//   HELD        some units keep their state in some steps
//   REALS       states before the first step and after the last are real values, see Ends
//   VALUES      real values of the states after each step are written
//   CODES       codes of them are written
//   QG_RRH, QG_OLD, QG_NEW: products that are rounded to their own codes
//   QG_ZONEOUT  states keep a share of what they were
// clang-format off: machine code depends on the order of headers, this is the one that was measured
#include "gates/arithmetic.cuh"
#include "recurrence/real_values.cuh"
#include "gates/compressed_table.cuh"
#include "kernel_runtime/cuda/ptx.cuh"
#include "boundary/quantize.cuh"
#include "gates/saturating.cuh"
#include "recurrence/thread_tile.cuh"
// clang-format on

struct Numbers {
    Sequence s;
    const uint32_t *weights;  // fragments, [plane][group][block of 64][half][gate][register][lane]
    const Stored *Wx;         // [t][tile][group][16 * NB]
    const double *bias;       // (3, UP): bias and zero point, in accumulator units
    const double *m;          // (3, UP): M / 2^k
    const int32_t *exact_float;  // whether float holds every accumulator and multiplier, by KS
    Cell<Real> cell;
    Ends ends;
    Saturated saturated;
    const uint32_t *counts;  // (stretches): rows of groups whose input projection is there
};
struct Pair {
    Numbers d[DIRS];
};

// A table of floats in shared memory, from the least code of a sum on.
struct Bits {
    uint32_t base;

    inline unsigned char *open(const Table &t, unsigned char *memory) {
#pragma unroll 1
        for (int i = threadIdx.x; i < (int)t.entries; i += kThreads)
            copy_async<4>(memory + 4 * i, t.direct + i);
        base = shared_address(memory) +
               4u * (uint32_t)(kSaturated ? 0u - kIndexBits : (uint32_t)(t.least - t.pre_lo));
        if (kRoom) base = kept_number(base);
        return memory + (t.entries + 1) / 2 * 8;
    }
};

// A sum's bits, which have the magic number inside, are limited as an integer: both limits are one
// instruction where the lower one is 0.
inline float gate_of(const Bits &of, const Sum<float> &s, float v1, float v2) {
    const float total = Magic<float>::fma(v2, s.m[1], Magic<float>::times(v1, s.m[0]));
    const int lowest = __float_as_int(s.lo), most = __float_as_int(s.hi) - lowest;
    const int code = __float_as_int(Magic<float>::plus(total, Magic<float>::number()));
    return load_float(of.base + 4u * (uint32_t)limited_sum(code, -lowest, most));
}

template <bool kFromBits, int kMode>
struct Chosen {
    typedef Reader<kMode> type;
};
template <int kMode>
struct Chosen<true, kMode> {
    typedef Bits type;
};
template <>
struct Chosen<false, kLines> {
    typedef Lines<Real, kThreads, kRoom> type;
};

template <bool kValue>
struct Truth {
    static constexpr bool value = kValue;
};

// A code of the state before the first step: kinds are those of containers of OUT bytes.
inline int given_code(const Sequence &s, int64_t at) {
    const Code code = ((const Code *)s.h0)[at];
    if (OUT == 1) return s.h_kind == 0 ? (int)(int8_t)code : (int)code;
    return OUT == 2 ? (int)(int16_t)code : (int)code;
}

inline Real unpacked(const Stored &w, int gate, Real offset) {
#if WX == 1
    return (Real)(byte_as_float(w, gate) - (8388608.f + (float)offset));
#else
    const uint32_t word = gate == 2 ? w.y : w.x;
    return (Real)(half_as_float(word, gate == 1 ? 2 : 0) - (8388608.f + (float)offset));
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    recurrent(const __grid_constant__ Pair pair) {
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
    uint64_t *const barriers = (uint64_t *)(stages + kStages);
    unsigned char *const nan_rows = (unsigned char *)(barriers + 2 * NT);  // of the tile, by h0
    uint32_t *const any_nan = (uint32_t *)(nan_rows + 16);
    unsigned char *const factors = nan_rows + kFlags;  // [warp][gate][unit], bias and multiplier
    // [step % RING][strip][thread]
    Words *const ring = (Words *)(factors + kFactors) + threadIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lane8 = lane / 4, quad = lane % 4;
    const int half = warp % kHalves, local = warp / kHalves;
    const int part = KS == 2 ? half : 0;
    const int rank = CL == 1 ? 0 : (int)cluster_rank();
    const int tile = (int)(blockIdx.x / CL);
    const int strips = (int)(gridDim.x / CL) * NT;
    const int group = rank * kGroups + local, groups = UP / 16;
    const int64_t H = p.s.H, N = p.s.N, T = p.s.T;
    const int64_t first_row = (int64_t)tile * kTileRows;

    // whatever comes from memory is on its way before anything waits; the numbers of steps, too
    const uint32_t *const numbers = (const uint32_t *)&p;
    constexpr int kNumberLines = (int)sizeof(Numbers) / 64;
    uint32_t touched = numbers[(lane < kNumberLines ? lane : 0) * 16];
    uint32_t w[WP][kBlocks][2][3][4];  // this warp's weights
    double loaded[2][kRows][3];
    const auto load_weights = [&] {
#pragma unroll
        for (int plane = 0; plane < WP; ++plane)
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int i = 0; i < 24; ++i) {
                    const int block = (plane * groups + group) * (KP / 64) + part * kBlocks + b;
                    w[plane][b][i / 12][i / 4 % 3][i % 4] = p.weights[(block * 24 + i) * 32 + lane];
                }
#pragma unroll
        for (int i = 0; i < 3 * kRows; ++i) {
            const int row = i / 3, gate = i % 3;
            const int unit = group * 16 + lane8 + 8 * place_of(row, quad, half).row8;
            loaded[0][row][gate] = p.bias[gate * UP + unit];
            loaded[1][row][gate] = p.m[gate * UP + unit];
        }
    };
    if (kRoom) load_weights();
    typename Chosen<kBits, TZ>::type z_of;
    typename Chosen<kBits, TR>::type r_of;
    typename Chosen<kBits, TG>::type g_of;
    g_of.open(p.cell.g,
              r_of.open(p.cell.r, z_of.open(p.cell.z, (unsigned char *)(ring - threadIdx.x +
                                                                        RING * NT * kThreads))));
    copies_commit();
    const int64_t step = p.s.reverse ? -1 : 1, first = p.s.reverse ? T - 1 : 0;
    const int64_t stride = (int64_t)strips * groups * 16 * NB;
    const int64_t ahead_step = kRoom ? kept_number(step * stride) : step * stride;
    const Place mine = place_of(0, quad, half);
    const Stored *ahead = p.Wx + first * stride + ((int64_t)tile * NT * groups + group) * 16 * NB +
                          (works(quad, half) ? stored_at(NB, lane8, mine.row8, mine.n % NB) : 0);
    const int steps = (int)T, t_step = kRoom ? (int)kept_number((uint32_t)step) : (int)step;

    // the state before the first step, as bytes
    const auto load_state = [&] {
        constexpr int kEach = (kPlane + kThreads - 1) / kThreads;
        constexpr int kBatch = kEach < 8 ? kEach : 8;  // loads at once
#pragma unroll 1
        for (int from = threadIdx.x; from < kPlane; from += kBatch * kThreads) {
            int code[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = from + j * kThreads, n = i / kStride, k = i % kStride;
                code[j] = 0;
                if (i < kPlane && k < H && first_row + n < N)
                    code[j] = (!REALS && p.s.h0 ? given_code(p.s, (first_row + n) * H + k)
                                                : (int)p.cell.h_zero) -
                              (int)p.cell.h_offset;
            }
#if REALS
            if (p.ends.h0) {
                float real[kBatch];
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    const int i = from + j * kThreads, n = i / kStride, k = i % kStride;
                    real[j] = 0.f;
                    if (i < kPlane && k < H && first_row + n < N)
                        real[j] = p.ends.h0[(first_row + n) * H + k];
                }
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    bool nan = false;
                    code[j] += quantized(real[j], p.ends.scale, p.ends.lo, p.ends.hi, nan);
                    if (nan) {
                        nan_rows[(from + j * kThreads) / kStride] = 1;
                        *any_nan = 1;
                    }
                }
            }
#endif
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = from + j * kThreads;
                if (i >= kPlane) break;
                unsigned char *const to = state + stands_at(i / kStride, i % kStride);
                to[0] = (unsigned char)(code[j] ^ kTop);
                to[kState] = 0;
                if (HP == 2) {
                    to[kNextPlane] = (unsigned char)(code[j] >> 8);
                    to[kState + kNextPlane] = 0;
                }
            }
        }
    };
#if REALS
    if (threadIdx.x < kFlags / 4) ((uint32_t *)nan_rows)[threadIdx.x] = 0;
    __syncthreads();
    const bool finite = *p.ends.finite != 0;
#endif
    if (!kRoom) {
        load_state();  // while there are registers
        load_weights();
    }

    // this thread's elements
    const bool exact_float = sizeof(Real) == 4 && p.exact_float[KS - 1] != 0;
    int bias[kRows][3];
    Real wide_bias[kRows][3], m[kRows][3];
    int times[kRows][3];  // m in units of 2^-32
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const double b = loaded[0][row][gate], by = loaded[1][row][gate];
            bias[row][gate] = kSets == 1 ? (int)b : kWhole ? (int)(int64_t)b : 0;
            wide_bias[row][gate] = kSets == 1 || kWhole ? (Real)0 : (Real)b;
            m[row][gate] = (Real)(by * (kSaturated ? 1. / 256 : 1.));
            times[row][gate] = kWhole ? (int)(by * 4294967296.) : 0;
        }
    const int Rh_lo = R::integer(p.cell.Rh_lo), Rh_hi = R::integer(p.cell.Rh_hi);
    // what keeping low bytes less 128 takes off the sums of a unit
    int missing[3] = {};
    int *const missing_at = exchange + kExchange / 2 + local * 192 + lane;
    if (kPacked) {
        int total[3][4] = {};
#pragma unroll
        for (int i = 0; i < kBlocks * 6; ++i)
            mma<false, false>(total[i % 3], w[0][i / 6][i / 3 % 2][i % 3], 0x01010101u,
                              0x01010101u);
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            missing[gate] = 128 * pick(total[gate], 2 * place_of(0, quad, half).row8);
            if (KS == 2) missing_at[(half * 3 + gate) * 32] = missing[gate];
        }
    }
    if (kRoom) load_state();
    if (CL > 1 && threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < 2 * NT; ++i) barrier_init(barriers + i);
    }

    int64_t at[NT][kElements];
    int byte_at[kElements], length[NT][kColumns];
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int turn = i / kElements, e = i % kElements;
        const Place place = place_of(e, quad, half);
        const int unit = group * 16 + lane8 + 8 * place.row8;
        const int64_t row = first_row + turn * NB + place.n;
        at[turn][e] = row * H + unit;
        if (e % kSame == 0)
            length[turn][e / kSame] = (int)(row < N && p.s.lengths ? p.s.lengths[row] : T);
        byte_at[e] = CL == 1 ? place.n * kStride + unit
                     : kBulk
                         ? place.n * 64 + local * 16 + lane8 + 8 * place.row8
                         : place.n % NB / (kShared && NB > 1 ? 2 : 1) * 16 + lane8 + 8 * place.row8;
    }
    // whether elements are any of the sequence's, from its units and rows beyond this thread's
    // first
    const int64_t rows_beyond = N - first_row - mine.n;
    int units_left = works(quad, half) ? (int)H - group * 16 - lane8 - 8 * mine.row8 : 0;
    int rows_left = rows_beyond < kTileRows ? (int)rows_beyond : kTileRows;
    if (kTight) units_left = (int)pinned((uint32_t)units_left);
    if (kTight) rows_left = (int)pinned((uint32_t)rows_left);
    const auto kept = [&](int turn, int e) {
        const Place place = place_of(e, quad, half);
        return units_left > 8 * (place.row8 - mine.row8) &&
               rows_left > turn * NB + place.n - mine.n;
    };
    Code *const out = (Code *)p.s.out;
    const int64_t half_up = kWhole ? kept_number((int64_t)0x80000000LL) : 0;
    const int h_zero = (int)p.cell.h_zero;
    int raw = (int)(p.cell.h_zero - p.cell.h_offset);
    if (kRoom) raw = (int)kept_number((uint32_t)raw);
    unsigned char *const stage = stages + warp * kStage;
    const int sender = kBulk ? (int)uniform((uint32_t)warp) : 0;

    // what this thread copies from the state to the output
    const int copy_row = threadIdx.x / (kUnits / kCopied);
    const int copy_unit = rank * kUnits + threadIdx.x % (kUnits / kCopied) * kCopied;
    const bool copies =
        CODES && COPY && copy_row < kTileRows && copy_unit < H && first_row + copy_row < N;
    const unsigned char *const copied = state + stands_at(copy_row, copy_unit);
    uint32_t flip = p.cell.h_offset ? 0x80808080u : 0;
    if (kRoom) flip = kept_number(flip);
    const int64_t out_step = kRoom ? kept_number(step * N * H) : step * N * H;
    Code *copied_to = out + ((first - step) * N + first_row + copy_row) * H + copy_unit;
    auto copy_load = [&](int parity) {
        const unsigned char *const from = copied + parity * kState;
        uint4 v = {0, 0, 0, 0};
#if COPY == 16 && HP == 1
        v = *(const uint4 *)from;
#elif COPY == 16
        const uint2 low = *(const uint2 *)from, high = *(const uint2 *)(from + kNextPlane);
        v.x = low.x;
        v.y = low.y;
        v.z = high.x;
        v.w = high.y;
#elif COPY == 4
        v.x = *(const uint32_t *)from;
#endif
        return v;
    };
    auto copy_store = [&](bool now, uint4 v) {
#if COPY == 16 && HP == 1
        v.x ^= flip;
        v.y ^= flip;
        v.z ^= flip;
        v.w ^= flip;
        store_where(now, copied_to, v);
#elif COPY == 16
        v.x ^= kTop * 0x01010101u;
        v.y ^= kTop * 0x01010101u;
        v.z ^= flip;
        v.w ^= flip;
        uint4 both;
        both.x = interleave(v.x, v.z, 0);
        both.y = interleave(v.x, v.z, 2);
        both.z = interleave(v.y, v.w, 0);
        both.w = interleave(v.y, v.w, 2);
        store_where(now, copied_to, both);
#elif COPY == 4
        store_where(now, copied_to, v.x ^ flip);
#endif
    };

#if REALS
    if (!finite) *any_nan = 1;
#endif
    copies_wait<0>();  // the tables
    if (CL > 1)
        cluster_sync();
    else
        __syncthreads();

    if (kPacked)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            if (KS == 2) missing[gate] += missing_at[((1 - half) * 3 + gate) * 32];
            bias[0][gate] += missing[gate];
            wide_bias[0][gate] += (Real)(kWhole ? 0 : missing[gate]);
        }
    // a warp reads what it has written
    const uint32_t factors_at = pinned(shared_address(factors) + (warp * 48 + lane8) * 8);
    const auto factor_at = [&](int row, int gate) {
        const int row8 = NB == 8 ? row : place_of(0, quad, half).row8;
        return factors_at + (uint32_t)(gate * 16 + row8 * 8) * 8;
    };
    if (kTight && quad % (NB == 8 ? 4 : 2) == 0)
#pragma unroll
        for (int row = 0; row < kRows; ++row)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                store(factor_at(row, gate),
                      uint2{(uint32_t)bias[row][gate],
                            kWhole ? (uint32_t)times[row][gate] : float_bits((float)m[row][gate])});
    if (kTight) __syncwarp();

    Real h[NT][kElements];  // magic number added
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int turn = i / kElements, e = i % kElements;
        const Place place = place_of(e, quad, half);
        const unsigned char *const from =
            state + stands_at(turn * NB + place.n, group * 16 + lane8 + 8 * place.row8);
        int code =
            HP == 1 ? (int)(int8_t)from[0] : (from[0] ^ kTop) | (int)(int8_t)from[kNextPlane] << 8;
        code += (int)(p.cell.h_offset - p.cell.h_zero);
        h[turn][e] = R::plus((Real)(kept(turn, e) ? code : 0), R::number());
    }

    int t = (int)first;
    // real values go out from registers: where blocks wait for each other, meanwhile, otherwise
    // behind the products of the next step
    constexpr bool kBehind = CL == 1;
    const int64_t value_step =
        kRoom || (kTight && NT == 2) ? kept_number(step * N * p.ends.next) : step * N * p.ends.next;
    float *value_at = p.ends.values + group * 16 + lane8 + 8 * mine.row8 +
                      ((first - (kBehind ? step : 0)) * N + first_row + mine.n) * p.ends.next;
    const auto value_of = [&](Real v) {
        const float code = sizeof(Real) == 4 ? (float)plain(v) : (float)R::integer(v);
        return Magic<float>::times(code, p.ends.scale);
    };
    const auto give = [&](int turn, bool now) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const Place place = place_of(e, quad, half);
            const int64_t row = (turn * NB + place.n - mine.n) * p.ends.next;
            float *const to = value_at + row + 8 * (place.row8 - mine.row8);
            store_where(now && kept(turn, e), to, float_bits(value_of(h[turn][e])));
        }
        if (turn == NT - 1) value_at += value_step;
    };

    // the numbers of steps come into the nearest cache
#pragma unroll
    for (int i = 0; i < kNumberLines; ++i) touched ^= numbers[16 * i];
    if (touched == 0x9E3779B9u) prefetch(p.Wx);

    // rows of groups that are there, of the stretch that a step is in
    const auto rows_there = [&](int at) {
        return (int)load_count(p.counts + at / (STRETCH ? STRETCH : 1));
    };
    // waits for the stretch that starts with a step, of which so much was there
    const auto await_stretch = [&](int at, int there) {
        const int left = steps - at;
        const int wanted = (left < STRETCH ? left : STRETCH) * (int)N * groups;
        while (there < wanted) there = rows_there(at);
        acquire();
    };

    // what came from earlier launches starts here, and is written from here on
    if (STRETCH)
        await_stretch(0, 0);
    else
        await_launches();
#if REALS
    // of the whole input's NaN, which is there now, unless the projection goes on
    constexpr bool kNanFirst = !STRETCH && kRoom;
    const uint32_t nan_word = kNanFirst ? first_nan(p.ends, first_row, N, T) : 0;
#endif
#pragma unroll
    for (int i = 0; i < kAhead * NT; ++i) {
        if (i / NT < steps)
            start_words(ring + i * kThreads, ahead + i % NT * (int64_t)groups * 16 * NB);
        copies_commit();
        if (i % NT == NT - 1) ahead += ahead_step;
    }

#if HELD
    uint8_t held[2][NT][kElements];
    const auto load_held = [&](int parity, int turn, int64_t t) {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
            held[parity][turn][e] = kept(turn, e) && p.s.held[t * N * H + at[turn][e]];
    };
#pragma unroll
    for (int turn = 0; turn < NT; ++turn) {
        load_held(0, turn, first);
        if (T > 1) load_held(1, turn, first + step);
    }
#endif
    Code *written = out + first * N * H;

    // what this thread reads of a state
    const unsigned char *const operands = state + lane8 % NB * (kBulk ? 64 : kStride) +
                                          part * kBlocks * kNextBlock + quad * 16 +
                                          (kPacked ? lane8 / NB % 2 * kNextPlane : 0);
    const uint32_t operands_at = kTight ? pinned(shared_address(operands)) : 0;

    // A step of one strip. kKnown: float, or int32, holds every accumulator, so that nothing stands
    // between products and gates.
    auto advance = [&](auto known, int turn, int s, int parity) {
        constexpr bool kKnown = decltype(known)::value;
        // what may be written while the other strip is read
        const int copy = NT == 2 ? turn : parity;
        uint64_t *const received = barriers + 2 * turn;
        if (NT == 2 && s) barrier_wait<kLeaves>(received + parity, (uint32_t)((s - 1) >> 1) & 1);
        const bool copies_now = copies && s && (NT == 1 || copy_row / NB == turn);
        uint4 old_states = {0, 0, 0, 0};
        if (copies_now) old_states = copy_load(parity);

        int acc[kAccumulators][3][4];
#pragma unroll
        for (int i = 0; i < kAccumulators * 12; ++i) acc[i / 12][i / 4 % 3][i % 4] = 0;
        const int operand_from = parity * kState + turn * NB * kStride * (kBulk ? HP : 1);
        const unsigned char *const operand = operands + operand_from;
        const uint32_t operand_at = kTight  ? operands_at + operand_from
                                    : kBulk ? pinned(shared_address(operand))
                                            : 0;
        const auto fragment = [&](int b, int plane) {
            const int from = plane * kNextPlane + b * kNextBlock;
            return kBulk || kTight ? load16(operand_at + from) : *(const uint4 *)(operand + from);
        };
        const auto multiply = [&](int b, int j, int gate, const uint32_t (&f)[kReads][4]) {
            const int set = kPairs && gate != 2 ? j : j % SETS;
            mma<WP == 2, kReads == 2>(acc[set][gate], w[0][b][j][gate], f[0][2 * j],
                                      f[0][2 * j + 1]);
            if (kReads == 2)
                mma<WP == 2, false>(acc[1 % kTerms][gate], w[0][b][j][gate], f[kReads - 1][2 * j],
                                    f[kReads - 1][2 * j + 1]);
            if (WP == 2)
                mma<false, HP == 2>(acc[1 % kTerms][gate], w[WP - 1][b][j][gate], f[0][2 * j],
                                    f[0][2 * j + 1]);
            if (WP == 2 && HP == 2)
                mma<false, false>(acc[kTerms - 1][gate], w[WP - 1][b][j][gate],
                                  f[kReads - 1][2 * j], f[kReads - 1][2 * j + 1]);
        };
        // sums may wrap around: those of high bytes, times 256, are where low ones go on
        constexpr bool kOnTop = kKnown && kWhole && kReads == 2 && !kLate && !kRoom;
        if (kOnTop) {
#pragma unroll
            for (int i = 0; i < 2 * kBlocks; ++i) {
                const int b = i % kBlocks, plane = i < kBlocks ? HP - 1 : 0;
                const uint4 v = fragment(b, plane);
#pragma unroll
                for (int j = 0; j < 12 && i == kBlocks; ++j)
                    acc[0][j / 4][j % 4] = (int)((uint32_t)acc[0][j / 4][j % 4] * 256u);
#pragma unroll
                for (int j = 0; j < 6; ++j) {
                    const int gate = j % 3, second = j / 3;
                    const uint32_t b0 = second ? v.z : v.x, b1 = second ? v.w : v.y;
                    if (plane == 0)
                        mma<false, true>(acc[0][gate], w[0][b][second][gate], b0, b1);
                    else
                        mma<false, false>(acc[0][gate], w[0][b][second][gate], b0, b1);
                }
            }
        }
        uint32_t f[kKept][kReads][4];
#pragma unroll
        for (int b = 0; b < kBlocks && !kOnTop; ++b) {
            uint32_t (&to)[kReads][4] = f[b % kKept];
#pragma unroll
            for (int plane = 0; plane < kReads; ++plane) {
                const uint4 v = fragment(b, plane);
                to[plane][0] = v.x;
                to[plane][1] = v.y;
                to[plane][2] = v.z;
                to[plane][3] = v.w;
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                multiply(b, j, 1, to);
                multiply(b, j, 2, to);
                if (!kLate) multiply(b, j, 0, to);
            }
        }
        // the update gate is needed last: its products have time while the reset gate is made
        if (kLate) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
                for (int plane = 0; plane < kReads && kKept < kBlocks; ++plane) {
                    const uint4 v =
                        load16(shared_address(operand + plane * kNextPlane + b * kNextBlock));
                    f[0][plane][0] = v.x;
                    f[0][plane][1] = v.y;
                    f[0][plane][2] = v.z;
                    f[0][plane][3] = v.w;
                }
#pragma unroll
                for (int j = 0; j < 2; ++j) multiply(b, j, 0, f[b % kKept]);
            }
        }

        if (CL > 1 && threadIdx.x == 0) barrier_expect(received + (1 - parity), kReceived);
        copies_wait<kAhead * NT - 1>();
        const Words Wx = ring[(s % RING * NT + turn) * kThreads];
        // into the place that was read a step ago
        if (s + kAhead < steps)
            start_words(ring + ((s + kAhead) % RING * NT + turn) * kThreads,
                        ahead + turn * (int64_t)groups * 16 * NB);
        copies_commit();
        // what the next step's loads wait for is asked for in time
        const bool next_stretch =
            STRETCH && turn == NT - 1 && (s + 1 + kAhead) % (STRETCH ? STRETCH : 1) == 0;
        int there = 0;
        if (next_stretch) there = rows_there(s + 1 + kAhead);
        if (CODES && COPY) copy_store(copies_now, old_states);
        if (VALUES && kBehind) give(turn, s != 0);

        int bias_now[kRows][3], times_now[kRows][3];
        Real m_now[kRows][3];
#pragma unroll
        for (int row = 0; row < kRows; ++row)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                uint2 factor = {(uint32_t)bias[row][gate], (uint32_t)times[row][gate]};
                if (kTight) factor = load8(factor_at(row, gate));
                bias_now[row][gate] = (int)factor.x;
                times_now[row][gate] = (int)factor.y;
                m_now[row][gate] = kTight ? (Real)bits_as_float(factor.y) : m[row][gate];
            }
        // sums of two products and a bias are one instruction
        constexpr bool kBiased = KS == 1 && kSets == 1;
        const auto in_pairs = [](int gate) { return SETS == 2 || (kPairs && gate < 2); };
#pragma unroll
        for (int i = 0; i < 12; ++i)
            if (in_pairs(i / 4))
                acc[0][i / 4][i % 4] += acc[kAccumulators - 1][i / 4][i % 4] +
                                        (kBiased ? bias_now[i % 4 / 2 % kRows][i / 4] : 0);

        // of the unit of this thread: the sums of its two columns and the other byte's
        int both[2][3][2];
        if (kPacked) {
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                apart(both[0][gate], both[1][gate], acc[0][gate], quad);
        }

        // both bytes of the state in one sum where int32 holds it; sums may wrap around
        constexpr int kParts = kWhole && kKnown ? 1 : kSets;
        if (kParts < kSets && !kOnTop) {
#pragma unroll
            for (int i = 0; i < 12; ++i) {
                const int gate = i / 4, at = i % 4;
                if (kPacked && at < 2)
                    both[0][gate][at % 2] = (int)((uint32_t)both[1][gate][at % 2] * 256u +
                                                  (uint32_t)both[0][gate][at % 2]);
                if (!kPacked)
                    acc[0][gate][at] = (int)((uint32_t)acc[kAccumulators - 1][gate][at] * 256u +
                                             (uint32_t)acc[0][gate][at]);
            }
        }
        const auto sum_at = [&](int set, int gate, int slot) {
            if (kPacked) return slot & 1 ? both[set % 2][gate][1] : both[set % 2][gate][0];
            return pick(acc[set % kAccumulators][gate], slot);
        };

        // sums of this thread's elements, and where only 64 bits may hold both halves, the other's
        constexpr bool kApart = KS == 2 && kWhole && kKnown;
        int sum[kParts][3][kElements], other[3][kElements];
#pragma unroll
        for (int set = 0; set < kParts; ++set)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                for (int e = 0; e < kElements; ++e)
                    sum[set][gate][e] = sum_at(set, gate, place_of(e, quad, half).slot);
        if (KS == 2) {
            constexpr int kCount = kSets * 3 * kElements * 32;
            const int base = (copy * kGroups + local) * 2;
            int *const given = exchange + (base + half) * kCount + lane;
            const int *const taken = exchange + (base + 1 - half) * kCount + lane;
#pragma unroll
            for (int set = 0; set < kParts; ++set)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                    for (int e = 0; e < kElements; ++e)
                        given[((set * 3 + gate) * kElements + e) * 32] =
                            sum_at(set, gate, place_of(e, quad, 1 - half).slot);
            sync_threads(1 + local, 64);
#pragma unroll
            for (int set = 0; set < kParts; ++set)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                    for (int e = 0; e < kElements; ++e) {
                        const int v = taken[((set * 3 + gate) * kElements + e) * 32];
                        if (kApart)
                            other[gate][e] = v;
                        else
                            sum[set][gate][e] = (int)((uint32_t)sum[set][gate][e] + (uint32_t)v);
                    }
        }

        // zero-point-free codes of R h; those of kWhole have no magic number
        Real Rh[3][kElements];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int row = kRows == 2 ? e & 1 : 0;
                if (kWhole) {
                    uint32_t v = (uint32_t)sum[0][gate][e] + (uint32_t)bias_now[row][gate];
                    if (kParts == 2) v += (uint32_t)sum[kParts - 1][gate][e] * 256u;
                    // half up, and a tie to the even number of its two
                    int64_t product = times_plus((int)v, times_now[row][gate], half_up);
                    if (kApart) product = times_plus(other[gate][e], times_now[row][gate], product);
                    int rounded = (int)(product >> 32);
                    if ((uint32_t)product == 0) rounded &= ~1;
                    const int limited = rounded < Rh_lo ? Rh_lo : rounded;
                    Rh[gate][e] = (Real)(limited > Rh_hi ? Rh_hi : limited);
                    continue;
                }
#if SATURATED
                Rh[gate][e] = share_of(
                    p.saturated.Rh,
                    (Real)(sum[0][gate][e] + (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate])),
                    m_now[row][gate]);
                continue;
#endif
                Real v;
                if (kSets == 1)
                    v = (Real)(sum[0][gate][e] +
                               (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate]));
                else {
                    v = R::fma((Real)sum[1 % kParts][gate][e], (Real)256, wide_bias[row][gate]);
                    v = R::plus(v, (Real)sum[0][gate][e]);
                    if (kSets == 3) v = R::fma((Real)sum[kParts - 1][gate][e], (Real)65536, v);
                }
                Rh[gate][e] = R::limit(round_term(v, m_now[row][gate]), p.cell.Rh_lo, p.cell.Rh_hi);
            }
        if (sizeof(Real) == 4 && !kKnown && __builtin_expect(!exact_float, 0)) {
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
#pragma unroll
                for (int e = 0; e < kElements; ++e) {
                    const int row = kRows == 2 ? e & 1 : 0;
                    const int unit = group * 16 + lane8 + 8 * place_of(e, quad, half).row8;
                    double total = kWhole
                                       ? p.bias[gate * UP + unit]
                                       : (double)sum[0][gate][e] +
                                             (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate]);
                    if (kWhole)
                        total += (double)sum[kParts - 1][gate][e] * 256 + (double)sum[0][gate][e] +
                                 (double)missing[gate];
                    const double v = round_term(total, p.m[gate * UP + unit]);
                    const double low = (double)p.cell.Rh_lo - (double)R::number();
                    const double high = (double)p.cell.Rh_hi - (double)R::number();
                    const double limited = Magic<double>::limit(plain(v), low, high);
                    Rh[gate][e] = (Real)(kSaturated ? (limited - low) / 256
                                         : kWhole   ? limited
                                                    : limited + (double)R::number());
                }
        }

        unsigned char *const next = state + (1 - parity) * kState;
        // what another block still fetches is not written: it has sent what this one waited for
        unsigned char *const to = CL == 1 ? next
                                  : kBulk ? next + (turn * CL + rank) * kSlice
                                          : stage + copy * (kGroups * kHalves * kStage);
        // all results before any store: a store of bytes could be to anything that is read
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            Real Rh_e[3], Wx_e[3];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                Rh_e[gate] = kWhole || kSaturated ? Rh[gate][e] : plain(Rh[gate][e]);
                Wx_e[gate] = unpacked(Wx.w[e], gate, p.cell.Wx_offset);
            }
#if SATURATED
            Real moved = next_state(p.cell, p.saturated, z_of.base, r_of.base, g_of.base, Wx_e[0],
                                    Wx_e[1], Wx_e[2], Rh_e[0], Rh_e[1], Rh_e[2], plain(h[turn][e]));
#else
            Real moved = next_state<Real>(p.cell, z_of, r_of, g_of, Wx_e[0], Wx_e[1], Wx_e[2],
                                          Rh_e[0], Rh_e[1], Rh_e[2], plain(h[turn][e]));
#endif
#if QG_ZONEOUT
            moved = weighted(p.cell.zoneout, plain(h[turn][e]), plain(moved));
#endif
#if HELD
            if (held[parity][turn][e]) continue;
#endif
            if (t < length[turn][e / kSame]) h[turn][e] = moved;
        }
        if (works(quad, half)) {
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int code = R::integer(h[turn][e]) + raw;
                to[byte_at[e]] = (unsigned char)(code ^ kTop);
                if (HP == 2)
                    to[(CL == 1 ? kPlane
                        : kBulk ? kNextPlane
                                : kOwned * 16) +
                       byte_at[e]] = (unsigned char)(code >> 8);
            }
        }
        if (CODES && !COPY) {
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (kept(turn, e)) written[at[turn][e]] = (Code)(R::integer(h[turn][e]) + h_zero);
        }
#if HELD
        if (s + 2 < steps) load_held(parity, turn, t + 2 * step);
#endif
        if (turn == NT - 1) {  // of this step
            ahead += ahead_step;
            copied_to += out_step;
            written += out_step;
            t += t_step;
        }
        if (CL == 1) {
            if (next_stretch) await_stretch(s + 1 + kAhead, there);
            __syncthreads();
            return;
        }
        if (kBulk) {
            shown_to_copies();
            __syncthreads();
            const uint32_t from = shared_address(to), told = shared_address(received + 1 - parity);
#pragma unroll
            for (int i = 1; i < CL; i += kThreads / 32)
                if (i + kThreads / 32 <= CL || i + sender < CL)
                    send_slice(from, told, (uint32_t)(rank + i + sender) % CL, kSlice);
        } else {
            __syncwarp();
        }
        if (!kBulk && (NB > 1 || half == 0)) {
#pragma unroll
            for (int i = lane; i < HP * kOwned * CL; i += 32) {
                const int chunk = i % (HP * kOwned), peer = i / (HP * kOwned);
                const int n = NB == 1 ? 0 : kShared ? chunk % kOwned * 2 + half : chunk % kOwned;
                send(next + chunk / kOwned * kPlane + (turn * NB + n) * kStride + group * 16,
                     received + (1 - parity), peer, *(const uint4 *)(to + chunk * 16));
            }
        }
        if (VALUES && !kBehind) give(turn, true);
        if (next_stretch) await_stretch(s + 1 + kAhead, there);
        if (NT == 1) barrier_wait<kLeaves>(received + (1 - parity), (uint32_t)(s >> 1) & 1);
    };
    constexpr bool kMayKnow = sizeof(Real) == 4;  // on the device
    const auto go = [&](auto known) {
        // what is rarely run is compiled once
        constexpr bool kTwice = decltype(known)::value || !kMayKnow;
        if (HELD || (NT == 1 && kTwice)) {
            for (int s = 0; s < steps; s += 2) {
#pragma unroll
                for (int turn = 0; turn < NT; ++turn) advance(known, turn, s, 0);
                if (s + 1 < steps)
#pragma unroll
                    for (int turn = 0; turn < NT; ++turn) advance(known, turn, s + 1, 1);
            }
        } else {
            for (int s = 0; s < steps; ++s)
#pragma unroll
                for (int turn = 0; turn < NT; ++turn) advance(known, turn, s, s & 1);
        }
        for (int turn = 0; NT == 2 && turn < NT && steps; ++turn)
            barrier_wait<kLeaves>(barriers + 2 * turn + (steps & 1),
                                  (uint32_t)((steps - 1) >> 1) & 1);
    };
    if (kMayKnow && exact_float)
        go(Truth<kMayKnow>());
    else
        go(Truth<false>());
    if (CL > 1) cluster_arrive();
    if (copies) copy_store(true, copy_load(steps & 1));
    if (VALUES && kBehind) give(0, true);
    // what follows this launch follows the projection, too
    if (STRETCH) await_launches();
#if REALS
    float reals[NT * kElements];
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) reals[i] = value_of(h[i / kElements][i % kElements]);
    if (nan_seen<kNanFirst>(p.ends, Where().row, N, T, nan_word)) *any_nan = 1;
    give_last(p.s, p.ends, reals, nan_rows, any_nan);
#else
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int turn = i / kElements, e = i % kElements;
        if (kept(turn, e))
            ((Code *)p.s.last)[at[turn][e]] = (Code)(R::integer(h[turn][e]) + h_zero);
    }
#endif
    if (CL > 1) cluster_wait();
}
