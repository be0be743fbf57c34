// Real values before the first and after the last step of the recurrence, and NaN in its results.
#ifndef QUANT_GRU_REAL_VALUES_CUH
#define QUANT_GRU_REAL_VALUES_CUH

#include "recurrence/thread_tile.cuh"

// Real values at the boundary of a call, and the causes of NaN rows. A NaN in an input makes its
// row NaN from its step on. A NaN in the first state or in a weight makes rows NaN at all steps.
struct RealBoundary {
    const float *h0;        // (N, H), or null
    float *values;          // [(t * N + n) * next + unit]
    float *last;            // (N, H)
    float *last_nan;        // (N): 0, or NaN if the row is NaN; or null
    uint8_t *h0_nan;        // (N): whether rows of h0 have NaN, or null
    const uint8_t *nan;     // (N, stride): whether rows of the input have NaN at a step
    const uint8_t *finite;  // whether all weights are finite
    int64_t next, stride;   // the stride is a multiple of 4
    float scale, lo, hi;    // limits less the zero point
};

// The valid rows of a tile, and the number of 32-bit words of a row's NaN flags.
struct NanWords {
    int rows, words;
    uint32_t last;  // mask of the last word, because flags beyond the last step are not written

    inline NanWords(const RealBoundary &boundary, int64_t first_row, int64_t N, int64_t T) {
        rows = N - first_row < kTileRows ? (int)(N - first_row) : kTileRows;
        words = (int)(boundary.stride / 4);
        last = T % 4 ? 0xffffffffu >> (32 - 8 * (int)(T % 4)) : 0xffffffffu;
    }
    inline uint32_t counted(uint32_t word, int i) const {
        return word & (i == words - 1 ? last : 0xffffffffu);
    }
};

// Loads the first word that this thread checks. The load starts before the first step and is used
// after the last step, because nothing would hide its latency there.
inline uint32_t first_nan(const RealBoundary &boundary, int64_t first_row, int64_t N, int64_t T) {
    const NanWords w(boundary, first_row, N, T);
    const int n = threadIdx.x / 32, i = threadIdx.x % 32;
    if (n >= w.rows || i >= w.words) return 0;
    return ((const uint32_t *)(boundary.nan + (first_row + n) * boundary.stride))[i];
}

// Returns whether this thread finds a NaN in the inputs of a tile's rows, at any step. kRead:
// `first` is its first word.
template <bool kRead>
inline bool nan_seen(const RealBoundary &boundary, int64_t first_row, int64_t N, int64_t T,
                     uint32_t first) {
    const NanWords w(boundary, first_row, N, T);
    const int warp = (int)thread_again() / 32, lane = (int)thread_again() % 32;
    uint32_t seen = kRead ? w.counted(first, lane) : 0;
    for (int n = warp; n < w.rows; n += kThreads / 32) {
        const uint32_t *const from =
            (const uint32_t *)(boundary.nan + (first_row + n) * boundary.stride);
#pragma unroll 4
        for (int i = lane + (kRead && n == warp ? 32 : 0); i < w.words; i += 32)
            seen |= w.counted(from[i], i);
    }
    return seen != 0;
}

// The position of a thread, read again from special registers, so that no register keeps it during
// the steps.
struct Where {
    int quad, half, unit;
    int64_t row;

    inline Where() {
        const int thread = (int)thread_again(), block = (int)block_again();
        const int warp = thread / 32, group = block % CL * kGroups + warp / kHalves;
        quad = thread % 4;
        half = warp % kHalves;
        unit = group * 16 + thread % 32 / 4;
        row = (int64_t)(block / CL) * kTileRows;
    }
};

// Stores the states after the last step. Then overwrites this thread's results in NaN rows with
// NaN.
inline void give_last(const Sequence &s, const RealBoundary &boundary,
                      const float (&reals)[NT * kElements], const unsigned char *nan_rows,
                      uint32_t *any_nan) {
    const Where where;
    const float bad = __int_as_float(0x7fc00000);
    const auto at = [&](int i, const auto &action) {
        const Place place = place_of(i % kElements, where.quad, where.half);
        const int unit = where.unit + 8 * place.row8, n = i / kElements * NB + place.n;
        const int64_t row = where.row + n;
        if (works(where.quad, where.half) && unit < s.H && row < s.N)
            action(i, unit, row, nan_rows[n] != 0);
    };
    const auto give = [&](int i, int unit, int64_t row, bool before) {
        boundary.last[row * s.H + unit] = reals[i];
        if (unit == 0 && boundary.last_nan) boundary.last_nan[row] = 0.f;
        if (unit == 0 && boundary.h0_nan) boundary.h0_nan[row] = before;
    };
#pragma unroll
    for (int i = 0; i < NT * kElements; ++i) at(i, give);
    __syncthreads();
    if (!*any_nan) return;
    const int64_t step = s.reverse ? -1 : 1, first = s.reverse ? s.T - 1 : 0;
    const auto spoil = [&](int, int unit, int64_t row, bool before) {
        bool nan = before || !*boundary.finite;
        int64_t t = first;
#pragma unroll 1
        for (int i = 0; i < (int)s.T; ++i, t += step) {
            nan |= boundary.nan[row * boundary.stride + t] != 0;
            if (VALUES && nan) boundary.values[(t * s.N + row) * boundary.next + unit] = bad;
        }
        if (!nan) return;
        boundary.last[row * s.H + unit] = bad;
        if (unit == 0 && boundary.last_nan) boundary.last_nan[row] = bad;
    };
    // rarely run, so not unrolled
#pragma unroll 1
    for (int i = 0; i < NT * kElements; ++i) at(i, spoil);
}

#endif
