// Real values of x as a projection reads them, and their codes: each warp takes rows of its own.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
#ifndef QUANT_GRU_REALS_CUH
#define QUANT_GRU_REALS_CUH

#include "projected.cuh"
#include "quantize.cuh"

struct Reals {
    Projected to;
    const float *real;   // [t * step + n * next + feature]
    uint8_t *nan;        // (N, nan_stride): whether the row is NaN at a step
    int64_t step, next;  // in values
    int64_t C, nan_stride, parts;
    int64_t zero;  // of codes as they are kept in bytes
    Division division;
    int64_t fours;  // rows are made of aligned groups of four values
};

// Rows of a warp, four features of a row to a lane at a time: 8, 16 or 32 lanes have a row.
//
//   Taken<rows> taken(reals, first_row, count, from, seen);             // where rows start
//   taken.quantize<fours, turns ahead>(codes, stride, plane);           // codes to shared memory
//   taken.flag();                                                       // rows that are NaN
//
// `from` and `seen` have room for the rows in shared memory; rows are counted as Projected has
// them, and those that are not there have codes of another row.
template <int kRows>
struct Taken {
    static_assert(kRows <= 32, "a lane knows where a row starts");

    const Reals &p;
    const float **const from;
    uint32_t *const seen;
    int nan_at;             // of the lane's row, -1 where it is not there
    int chunks, log_lanes;  // of a row, and as a power of two

    inline Taken(const Reals &p, int first_row, int count, const float **from, uint32_t *seen)
        : p(p), from(from), seen(seen), nan_at(-1) {
        const int lane = (int)threadIdx.x % 32, padded_N = (int)(p.to.tiles * p.to.NB);
        chunks = ((int)p.C + 3) / 4;
        log_lanes = chunks <= 8 ? 3 : chunks <= 16 ? 4 : 5;
        if (lane < kRows) {
            const int flat = first_row + lane < count ? first_row + lane : count - 1;
            const int t = (int)((uint32_t)flat / (uint32_t)padded_N), n = flat - t * padded_N;
            const bool there = first_row + lane < count && n < (int)p.to.N;
            if (there) nan_at = n * (int)p.nan_stride + t;
            from[lane] = p.real + t * p.step + (n < (int)p.to.N ? n : 0) * p.next;
            seen[lane] = 0;
        }
        __syncwarp();
    }

    template <int kAhead>
    struct Values {
        uint32_t bits[kAhead][4];
    };

    // Turns that come next, as many rows each as a warp has at once, and chunks left with them.
    struct Turns {
        int first, chunk, left;
    };

    inline int row_of(const Turns &turns, int j) const {
        return ((turns.first + j) << (5 - log_lanes)) + ((int)threadIdx.x % 32 >> log_lanes);
    }

    template <int kAhead>
    inline Turns after(const Turns &turns) const {
        Turns next = turns;
        next.first += kAhead;
        if (next.first << (5 - log_lanes) >= kRows) {
            next.first = 0;
            next.chunk += 1 << log_lanes;
            --next.left;
        }
        return next;
    }

    template <bool kFours, int kAhead>
    inline void load(Values<kAhead> &v, const Turns &turns) const {
        if (!turns.left) return;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int row = row_of(turns, j);
            if (row >= kRows || turns.chunk >= chunks) continue;
            const float *const start = from[row] + 4 * turns.chunk;
            if (kFours) {
                const uint4 all = *(const uint4 *)start;
                v.bits[j][0] = all.x;
                v.bits[j][1] = all.y;
                v.bits[j][2] = all.z;
                v.bits[j][3] = all.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v.bits[j][i] = 4 * turns.chunk + i < (int)p.C ? float_bits(start[i]) : 0;
            }
        }
    }

    template <int kAhead>
    inline void store(const Values<kAhead> &v, const Turns &turns, unsigned char *codes, int stride,
                      int plane) const {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int row = row_of(turns, j);
            if (row >= kRows || turns.chunk >= chunks) continue;
            uint32_t words[PLANES];
            if (four_codes<PLANES>(p.division, (int)p.zero, v.bits[j], words)) seen[row] = 1;
            unsigned char *const to = codes + row * stride + 4 * turns.chunk;
            *(uint32_t *)to = words[0];
            if (PLANES == 2) *(uint32_t *)(to + plane) = words[PLANES - 1];
        }
    }

    // Values are loaded while the ones before become codes.
    template <bool kFours, int kAhead>
    inline void quantize(unsigned char *codes, int stride, int plane) const {
        const int lanes = 1 << log_lanes;
        Values<kAhead> even, odd;
        Turns turns{0, (int)threadIdx.x % lanes, (chunks + lanes - 1) / lanes};
        load<kFours>(even, turns);
        while (turns.left) {
            const Turns next = after<kAhead>(turns);
            load<kFours>(odd, next);
            store(even, turns, codes, stride, plane);
            if (!next.left) break;
            turns = after<kAhead>(next);
            load<kFours>(even, turns);
            store(odd, next, codes, stride, plane);
        }
        __syncwarp();
    }

    inline void flag() const {
        if (nan_at >= 0) p.nan[nan_at] = seen[(int)threadIdx.x % 32] != 0;
    }
};

#endif
