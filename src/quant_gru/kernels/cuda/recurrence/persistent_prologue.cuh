// Prologue of the persistent recurrence, before its first step. Macros as in persistent.cu.
#ifndef QUANT_GRU_PERSISTENT_PROLOGUE_CUH
#define QUANT_GRU_PERSISTENT_PROLOGUE_CUH

#include "boundary/quantize.cuh"
#include "recurrence/block_layout.cuh"
#include "recurrence/gate_tables.cuh"
#include "recurrence/persistent_arguments.cuh"

// Loads the weights of a warp, and the biases and multipliers of its units.
inline void load_weights(const Numbers &p, const Position &me, uint32_t (&w)[WP][kBlocks][2][3][4],
                         double (&loaded)[2][kRows][3]) {
#pragma unroll
    for (int plane = 0; plane < WP; ++plane)
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < 24; ++i) {
                const int block =
                    (plane * (UP / 16) + me.group) * (KP / 64) + me.part * kBlocks + b;
                w[plane][b][i / 12][i / 4 % 3][i % 4] = p.weights[(block * 24 + i) * 32 + me.lane];
            }
#pragma unroll
    for (int i = 0; i < 3 * kRows; ++i) {
        const int row = i / 3, gate = i % 3;
        const int unit = me.group * 16 + me.lane8 + 8 * place_of(row, me.quad, me.half).row8;
        loaded[0][row][gate] = p.bias[gate * UP + unit];
        loaded[1][row][gate] = p.m[gate * UP + unit];
    }
}

// Writes the state before the first step into shared memory, as bytes.
inline void load_state(const Numbers &p, const Position &me, unsigned char *state,
                       unsigned char *nan_rows, uint32_t *any_nan) {
    constexpr int kEach = (kPlane + kThreads - 1) / kThreads;
    constexpr int kBatch = kEach < 8 ? kEach : 8;  // loads in flight per thread
#pragma unroll 1
    for (int from = threadIdx.x; from < kPlane; from += kBatch * kThreads) {
        int code[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
            const int i = from + j * kThreads, n = i / kStride, k = i % kStride;
            code[j] = 0;
            if (i < kPlane && k < me.H && me.first_row + n < me.N)
                code[j] = (!REALS && p.s.h0 ? given_code(p.s, (me.first_row + n) * me.H + k)
                                            : (int)p.cell.h_zero) -
                          (int)p.cell.h_offset;
        }
#if REALS
        if (p.boundary.h0) {
            float real[kBatch];
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int i = from + j * kThreads, n = i / kStride, k = i % kStride;
                real[j] = 0.f;
                if (i < kPlane && k < me.H && me.first_row + n < me.N)
                    real[j] = p.boundary.h0[(me.first_row + n) * me.H + k];
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                bool nan = false;
                code[j] += quantized(real[j], p.boundary.scale, p.boundary.lo, p.boundary.hi, nan);
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
}

// Converts biases and multipliers to the types of the requantization. `times` is m in units of
// 2^-32.
inline void convert_factors(const double (&loaded)[2][kRows][3], int (&bias)[kRows][3],
                            Real (&wide_bias)[kRows][3], Real (&m)[kRows][3],
                            int (&times)[kRows][3]) {
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
}

// Computes the offset that restores a unit's sums, because low bytes are stored less 128: 128 times
// the sums of its weights.
inline void offset_of_packed(const Position &me, const uint32_t (&w)[WP][kBlocks][2][3][4],
                             int *const &missing_at, int (&missing)[3]) {
    int total[3][4] = {};
#pragma unroll
    for (int i = 0; i < kBlocks * 6; ++i)
        mma<false, false>(total[i % 3], w[0][i / 6][i / 3 % 2][i % 3], 0x01010101u, 0x01010101u);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        missing[gate] = 128 * pick(total[gate], 2 * place_of(0, me.quad, me.half).row8);
        if (KS == 2) missing_at[(me.half * 3 + gate) * 32] = missing[gate];
    }
}

// Reads the states before the first step into registers, with the magic number added.
template <class Kept>
inline void load_first_states(const Numbers &p, const Position &me, unsigned char *const &state,
                              const Kept &in_range, Real (&h)[NT][kElements]) {
    typedef Magic<Real> R;
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) {
        const int strip = i / kElements, e = i % kElements;
        const Place place = place_of(e, me.quad, me.half);
        const unsigned char *const from =
            state + stands_at(strip * NB + place.n, me.group * 16 + me.lane8 + 8 * place.row8);
        int code =
            HP == 1 ? (int)(int8_t)from[0] : (from[0] ^ kTop) | (int)(int8_t)from[kNextPlane] << 8;
        code += (int)(p.cell.h_offset - p.cell.h_zero);
        h[strip][e] = R::plus((Real)(in_range(strip, e) ? code : 0), R::number());
    }
}

// Stores biases and multipliers in shared memory (TIGHT).
template <class Address>
inline void store_factors(const Address &factor_at, const int (&bias)[kRows][3],
                          const int (&times)[kRows][3], const Real (&m)[kRows][3]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            store(factor_at(row, gate),
                  uint2{(uint32_t)bias[row][gate],
                        kWhole ? (uint32_t)times[row][gate] : float_bits((float)m[row][gate])});
}

#endif
