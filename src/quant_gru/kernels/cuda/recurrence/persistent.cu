// The persistent recurrence runs all steps of a sequence in one launch. A cluster of CL blocks
// computes all steps of a tile of NT * NB rows. Each block computes the three gates of UP / CL
// units. The GEMM is weight-stationary: weights stay in registers as the A operand of the MMA
// instruction. Every block keeps the state of all units in shared memory.
//
// The stages of a step are in files of their own: step_gemm.cuh, step_reduce.cuh,
// step_requantize.cuh, step_gates.cuh, step_exchange.cuh and state_copy.cuh. The kernel's body
// includes them. As functions they would change the order of inlining and the machine code.
//
// Macro      Values            Meaning
// KP         64 KS * i         features of the state, padded: the depth of the GEMM
// UP         16 CL * i         units, padded
// CL         1, 2, 4, 8, 16    blocks per cluster
// KS         1, 2              warps that split the features of a group of 16 units
// SPREAD     1, 2              warps that repeat a group's GEMM and divide its rows (KS 1, NB > 1)
// NB         1, 2, 4, 8        rows per strip
// NT         1, 2              strips per tile; two strips alternate (ping-pong): one is exchanged
//                              while the other is computed
// HP, WP     1, 2              bytes of a state code and of a weight
// WX         1, 2              bytes of a stored code of the input projection
// OUT        1, 2, 4           bytes of a state code at the interface
// REAL       float, double     type of the gate arithmetic
// QG_WORDS   0, 1              some sums of the gates need 64-bit integers
// QG_POT     0, 1              multipliers of products are powers of two (float only)
// TZ, TR, TG 0 to 3            how tables of the gates are read: 0 to 2 see Reader, 3 see Lines
// COPY       0, 4, 16          bytes of states that a thread copies to the output after the GEMM;
//                              0: each thread stores its own elements
// BULK       0, 1              blocks exchange a strip's states of 64 units in one bulk copy
// DIRS       1, 2              directions of a launch (direction fusion)
// RING       2^i               steps whose input projection is being loaded or used
// SATURATED  0, 1              gate arithmetic of saturating.cuh: 8 bits, powers of two
// LATE       0, 1              the GEMM of the update gate comes after those of the other gates
// TIGHT      0, 1              biases and multipliers are in shared memory, as registers are few
// SETS       1, 2              accumulators per gate, added after the GEMM
// STRETCH    0, 2^i            steps per time chunk of an overlapping input projection; the kernel
//                              waits for whole chunks. 0: complete before the first step
// HELD       0, 1              some units keep their state in some steps
// REALS      0, 1              states before the first and after the last step are real values
// VALUES     0, 1              real values of the states are written after each step
// CODES      0, 1              codes of the states are written after each step
// QG_RRH, QG_OLD, QG_NEW
//            0, 1              whether the product is requantized to codes of its own
// QG_ZONEOUT 0, 1              the new state includes a fraction of the previous state
#include "boundary/quantize.cuh"
#include "recurrence/persistent_prologue.cuh"

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
    unsigned char *const nan_rows = (unsigned char *)(barriers + 2 * NT);  // NaN in h0, by tile row
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

    const Position me = {lane, warp,  lane8, quad, half, local,    part,
                         rank, group, H,     N,    T,    first_row};

    // start all loads from memory before the first wait, those of the kernel arguments included
    const uint32_t *const numbers = (const uint32_t *)&p;
    constexpr int kNumberLines = (int)sizeof(Numbers) / 64;
    uint32_t touched = numbers[(lane < kNumberLines ? lane : 0) * 16];
    uint32_t w[WP][kBlocks][2][3][4];  // this warp's weights
    double loaded[2][kRows][3];
    if (kRoom) load_weights(p, me, w, loaded);
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

#if REALS
    if (threadIdx.x < kFlags / 4) ((uint32_t *)nan_rows)[threadIdx.x] = 0;
    __syncthreads();
    const bool finite = *p.boundary.finite != 0;
#endif
    if (!kRoom) {
        load_state(p, me, state, nan_rows, any_nan);  // before weights occupy the registers
        load_weights(p, me, w, loaded);
    }

    // biases and multipliers of this thread's elements
    const bool exact_float = sizeof(Real) == 4 && p.exact_float[KS - 1] != 0;
    int bias[kRows][3];
    Real wide_bias[kRows][3], m[kRows][3];
    int times[kRows][3];  // m in units of 2^-32
    convert_factors(loaded, bias, wide_bias, m, times);
    const int Rh_lo = R::integer(p.cell.Rh_lo), Rh_hi = R::integer(p.cell.Rh_hi);
    // offset that restores a unit's sums, because low bytes are stored less 128
    int missing[3] = {};
    int *const missing_at = exchange + kExchange / 2 + local * 192 + lane;
    if (kPacked) offset_of_packed(me, w, missing_at, missing);
    if (kRoom) load_state(p, me, state, nan_rows, any_nan);
    if (CL > 1 && threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < 2 * NT; ++i) barrier_init(barriers + i);
    }

    int64_t at[NT][kElements];
    int byte_at[kElements], length[NT][kColumns];
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int strip = i / kElements, e = i % kElements;
        const Place place = place_of(e, quad, half);
        const int unit = group * 16 + lane8 + 8 * place.row8;
        const int64_t row = first_row + strip * NB + place.n;
        at[strip][e] = row * H + unit;
        if (e % kSame == 0)
            length[strip][e / kSame] = (int)(row < N && p.s.lengths ? p.s.lengths[row] : T);
        byte_at[e] = CL == 1 ? place.n * kStride + unit
                     : kBulk
                         ? place.n * 64 + local * 16 + lane8 + 8 * place.row8
                         : place.n % NB / (kShared && NB > 1 ? 2 : 1) * 16 + lane8 + 8 * place.row8;
    }
    // units and rows of the sequence from this thread's first element on, to check whether an
    // element is part of the sequence
    const int64_t rows_beyond = N - first_row - mine.n;
    int units_left = works(quad, half) ? (int)H - group * 16 - lane8 - 8 * mine.row8 : 0;
    int rows_left = rows_beyond < kTileRows ? (int)rows_beyond : kTileRows;
    if (kTight) units_left = (int)pinned((uint32_t)units_left);
    if (kTight) rows_left = (int)pinned((uint32_t)rows_left);
    const auto in_range = [&](int strip, int e) {
        const Place place = place_of(e, quad, half);
        return units_left > 8 * (place.row8 - mine.row8) &&
               rows_left > strip * NB + place.n - mine.n;
    };
    Code *const out = (Code *)p.s.out;
    const int64_t half_up = kWhole && QG_RULE != QG_FLOOR ? kept_number((int64_t)0x80000000LL) : 0;
    const int h_zero = (int)p.cell.h_zero;
    int raw = (int)(p.cell.h_zero - p.cell.h_offset);
    if (kRoom) raw = (int)kept_number((uint32_t)raw);
    unsigned char *const stage = stages + warp * kStage;
    const int sender = kBulk ? (int)uniform((uint32_t)warp) : 0;

    // the part of the state that this thread copies to the output
    const int copy_row = threadIdx.x / (kUnits / kCopied);
    const int copy_unit = rank * kUnits + threadIdx.x % (kUnits / kCopied) * kCopied;
    const bool copies =
        CODES && COPY && copy_row < kTileRows && copy_unit < H && first_row + copy_row < N;
    const unsigned char *const copied = state + stands_at(copy_row, copy_unit);
    uint32_t flip = p.cell.h_offset ? 0x80808080u : 0;
    if (kRoom) flip = kept_number(flip);
    const int64_t out_step = kRoom ? kept_number(step * N * H) : step * N * H;
    Code *copied_to = out + ((first - step) * N + first_row + copy_row) * H + copy_unit;
#include "recurrence/state_copy.cuh"
#if REALS
    if (!finite) *any_nan = 1;
#endif
    copies_wait<0>();  // for the tables
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
    // each warp reads only the factors that it wrote
    const uint32_t factors_at = pinned(shared_address(factors) + (warp * 48 + lane8) * 8);
    const auto factor_at = [&](int row, int gate) {
        const int row8 = NB == 8 ? row : place_of(0, quad, half).row8;
        return factors_at + (uint32_t)(gate * 16 + row8 * 8) * 8;
    };
    if (kTight && quad % (NB == 8 ? 4 : 2) == 0) store_factors(factor_at, bias, times, m);
    if (kTight) __syncwarp();

    Real h[NT][kElements];  // with the magic number added
    load_first_states(p, me, state, in_range, h);

    int t = (int)first;
    // Real values are stored from registers: with CL > 1 while blocks wait for each other,
    // otherwise after the GEMM of the next step.
    constexpr bool kBehind = CL == 1;
    const int64_t between = step * N * p.boundary.next;
    const int64_t value_step = kRoom || (kTight && NT == 2) ? kept_number(between) : between;
    float *value_at = p.boundary.values + group * 16 + lane8 + 8 * mine.row8 +
                      ((first - (kBehind ? step : 0)) * N + first_row + mine.n) * p.boundary.next;
    const auto value_of = [&](Real v) {
        const float code = sizeof(Real) == 4 ? (float)plain(v) : (float)R::integer(v);
        return Magic<float>::times(code, p.boundary.scale);
    };
    const auto store_values = [&](int strip, bool now) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const Place place = place_of(e, quad, half);
            const int64_t row = (strip * NB + place.n - mine.n) * p.boundary.next;
            float *const to = value_at + row + 8 * (place.row8 - mine.row8);
            store_where(now && in_range(strip, e), to, float_bits(value_of(h[strip][e])));
        }
        if (strip == NT - 1) value_at += value_step;
    };

    // load the kernel arguments into the nearest cache
#pragma unroll
    for (int i = 0; i < kNumberLines; ++i) touched ^= numbers[16 * i];
    if (touched == 0x9E3779B9u) prefetch(p.Wx);

    // reads the number of finished rows, over all groups, in the time chunk of a step
    const auto rows_there = [&](int at) {
        return (int)load_count(p.counts + at / (STRETCH ? STRETCH : 1));
    };
    // waits for the time chunk that starts at a step; `there` is a count that was read before
    const auto await_stretch = [&](int at, int there) {
        const int left = steps - at;
        const int wanted = (left < STRETCH ? left : STRETCH) * (int)N * groups;
        while (there < wanted) there = rows_there(at);
        acquire();
    };

    // data of earlier launches is read and overwritten only from here on
    if (STRETCH)
        await_stretch(0, 0);
    else
        await_launches();
#if REALS
    // the NaN flags of the whole input are complete here, unless the projection overlaps
    constexpr bool kNanFirst = !STRETCH && kRoom;
    const uint32_t nan_word = kNanFirst ? first_nan(p.boundary, first_row, N, T) : 0;
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
    const auto load_held = [&](int parity, int strip, int64_t t) {
#pragma unroll
        for (int e = 0; e < kElements; ++e)
            held[parity][strip][e] = in_range(strip, e) && p.s.held[t * N * H + at[strip][e]];
    };
#pragma unroll
    for (int strip = 0; strip < NT; ++strip) {
        load_held(0, strip, first);
        if (T > 1) load_held(1, strip, first + step);
    }
#endif
    Code *written = out + first * N * H;

    // the first operand of this thread in a state
    const unsigned char *const operands = state + lane8 % NB * (kBulk ? 64 : kStride) +
                                          part * kBlocks * kNextBlock + quad * 16 +
                                          (kPacked ? lane8 / NB % 2 * kNextPlane : 0);
    const uint32_t operands_at = kTight ? pinned(shared_address(operands)) : 0;

    // Computes a step of one strip. kKnown: float or int32 holds every accumulator, so that no
    // check is needed between the GEMM and the gates.
    auto compute_step = [&](auto known, int strip, int s, int parity) {
        constexpr bool kKnown = decltype(known)::value;
        // buffer that may be written while the other strip, or the previous step, is read
        const int copy = NT == 2 ? strip : parity;
        uint64_t *const received = barriers + 2 * strip;
        if (NT == 2 && s) barrier_wait<kLeaves>(received + parity, (uint32_t)((s - 1) >> 1) & 1);
        const bool copies_now = copies && s && (NT == 1 || copy_row / NB == strip);
        uint4 old_states = {0, 0, 0, 0};
        if (copies_now) old_states = copy_load(parity);

        int acc[kAccumulators][3][4];
#pragma unroll
        for (int i = 0; i < kAccumulators * 12; ++i) acc[i / 12][i / 4 % 3][i % 4] = 0;
        // R h, from the states of the last step
#include "recurrence/step_gemm.cuh"
        if (CL > 1 && threadIdx.x == 0) barrier_expect(received + (1 - parity), kReceived);
        copies_wait<kAhead * NT - 1>();
        const Words Wx = ring[(s % RING * NT + strip) * kThreads];
        // reuse the ring slot of the previous step
        if (s + kAhead < steps)
            start_words(ring + ((s + kAhead) % RING * NT + strip) * kThreads,
                        ahead + strip * (int64_t)groups * 16 * NB);
        copies_commit();
        // start reading the count that the next step's loads wait for
        const bool next_stretch =
            STRETCH && strip == NT - 1 && (s + 1 + kAhead) % (STRETCH ? STRETCH : 1) == 0;
        int there = 0;
        if (next_stretch) there = rows_there(s + 1 + kAhead);
        if (CODES && COPY) copy_store(copies_now, old_states);
        if (VALUES && kBehind) store_values(strip, s != 0);

        // sums of all features and bytes
#include "recurrence/step_reduce.cuh"
        // codes of R h
#include "recurrence/step_requantize.cuh"
        // the new states
#include "recurrence/step_gates.cuh"
        if (CODES && !COPY) {
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                if (in_range(strip, e))
                    written[at[strip][e]] = (Code)(R::integer(h[strip][e]) + h_zero);
        }
#if HELD
        if (s + 2 < steps) load_held(parity, strip, t + 2 * step);
#endif
        if (strip == NT - 1) {  // the last strip of this step
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
        // send the new states to the other blocks
#include "recurrence/step_exchange.cuh"
        if (VALUES && !kBehind) store_values(strip, true);
        if (next_stretch) await_stretch(s + 1 + kAhead, there);
        if (NT == 1) barrier_wait<kLeaves>(received + (1 - parity), (uint32_t)(s >> 1) & 1);
    };
    constexpr bool kMayKnow = sizeof(Real) == 4;  // then `exact_float` tells
    const auto run_steps = [&](auto known) {
        // the fallback rarely runs, so its step is compiled only once
        constexpr bool kTwice = decltype(known)::value || !kMayKnow;
        if (HELD || (NT == 1 && kTwice)) {
            for (int s = 0; s < steps; s += 2) {
#pragma unroll
                for (int strip = 0; strip < NT; ++strip) compute_step(known, strip, s, 0);
                if (s + 1 < steps)
#pragma unroll
                    for (int strip = 0; strip < NT; ++strip) compute_step(known, strip, s + 1, 1);
            }
        } else {
            for (int s = 0; s < steps; ++s)
#pragma unroll
                for (int strip = 0; strip < NT; ++strip) compute_step(known, strip, s, s & 1);
        }
        for (int strip = 0; NT == 2 && strip < NT && steps; ++strip)
            barrier_wait<kLeaves>(barriers + 2 * strip + (steps & 1),
                                  (uint32_t)((steps - 1) >> 1) & 1);
    };
    if (kMayKnow && exact_float)
        run_steps(Truth<kMayKnow>());
    else
        run_steps(Truth<false>());
    if (CL > 1) cluster_arrive();
    if (copies) copy_store(true, copy_load(steps & 1));
    if (VALUES && kBehind) store_values(0, true);
    // launches that follow this one must also follow the projection
    if (STRETCH) await_launches();
#if REALS
    float reals[NT * kElements];
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) reals[i] = value_of(h[i / kElements][i % kElements]);
    if (nan_seen<kNanFirst>(p.boundary, Where().row, N, T, nan_word)) *any_nan = 1;
    give_last(p.s, p.boundary, reals, nan_rows, any_nan);
#else
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int strip = i / kElements, e = i % kElements;
        if (in_range(strip, e))
            ((Code *)p.s.last)[at[strip][e]] = (Code)(R::integer(h[strip][e]) + h_zero);
    }
#endif
    if (CL > 1) cluster_wait();
}
