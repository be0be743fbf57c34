// Loads and quantizes the real values of x for a projection. Each warp has rows of its own.
//
//   PLANES      bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   SHORT       1 if a row has at most 128 features, which a warp loads at once
//   FOURS       1 if the number of features is a multiple of four
//   EXACT, WHOLE: see quantize.cuh
#ifndef QUANT_GRU_REALS_CUH
#define QUANT_GRU_REALS_CUH

#include "boundary/quantize.cuh"
#include "projection/epilogue.cuh"

struct Reals {
    Projected to;
    const float *real;   // [t * step + n * next + feature]
    uint8_t *nan;        // (N, nan_stride): whether a row is NaN at a step
    int64_t step, next;  // in values
    int64_t C, nan_stride, parts;
    int64_t zero;  // zero point of codes as stored in bytes
    Division division;
    int64_t fours;  // rows are aligned groups of four values
};

// The rows of a warp. Each lane processes four features of a row at a time. Lanes beyond the last
// features repeat the last ones.
//
//   Taken<rows> taken(reals, row, count, from, seen);        // computes where rows start
//   Taken<rows>::Values values;
//   taken.load(values, {});                                  // starts the first loads
//   taken.quantize(values, place, plane);                    // writes codes to shared memory
//   taken.flag();                                            // writes the flags of NaN rows
//
// `row` is the lane's row, padded as in Projected; missing rows get the codes of another row. Codes
// are written to `place(row, feature)`, and those of the second plane `plane` bytes further. `from`
// and `seen` are shared memory with one element per row.
template <int kRows>
struct Taken {
    static_assert(kRows <= 32, "a lane knows where a row starts");
    static constexpr int kTurns = (kRows + 7) / 8, kAhead = (kRows + kTurns - 1) / kTurns;

    const Reals &p;
    int64_t *const from;
    uint32_t *const seen;
    int nan_at;  // index of the NaN flag of the lane's row, -1 if the row is missing

    inline Taken(const Reals &p, int row, int count, int64_t *from, uint32_t *seen)
        : p(p), from(from), seen(seen), nan_at(-1) {
        const int lane = (int)threadIdx.x % 32, padded_N = (int)(p.to.tiles * p.to.NB);
        if (lane < kRows) {
            const int flat = row < count ? row : count - 1;
            const int t = (int)((uint32_t)flat / (uint32_t)padded_N), n = flat - t * padded_N;
            const bool there = row < count && n < (int)p.to.N;
            if (there) nan_at = n * (int)p.nan_stride + t;
            from[lane] = t * p.step + (n < (int)p.to.N ? n : 0) * p.next;
            seen[lane] = 0;
        }
        __syncwarp();
    }

    struct Values {
        uint32_t bits[kAhead][4];
    };

    // The next kAhead rows to load, and the part of 32 * 4 features.
    struct Next {
        int row = 0, part = 0;

        inline void move() {
            row += kAhead;
            if (row < kRows) return;
            row = 0;
            ++part;
        }
        inline int feature(int C) const {
            const int chunk = 32 * part + (int)threadIdx.x % 32, chunks = (C + 3) / 4;
            return 4 * (chunk < chunks ? chunk : chunks - 1);
        }
        inline bool there(int C) const { return SHORT ? part == 0 : part * 128 < C; }
    };

    static inline int row_of(const Next &next, int j) {
        const int row = next.row + j;
        return kRows % kAhead && row >= kRows ? kRows - 1 : row;
    }

    // kFours: rows are aligned groups of four values.
    template <bool kFours>
    inline void load(Values &v, const Next &next) const {
        const int feature = next.feature((int)p.C);
        const float *const first = p.real + feature;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (!kFours) {
                load_four(v.bits[j], row_of(next, j), feature);
                continue;
            }
            const uint4 all = *(const uint4 *)(first + from[row_of(next, j)]);
            v.bits[j][0] = all.x;
            v.bits[j][1] = all.y;
            v.bits[j][2] = all.z;
            v.bits[j][3] = all.w;
        }
    }

    inline void load_four(uint32_t (&bits)[4], int row, int feature) const {
        const float *const start = p.real + feature + from[row];
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = feature + i < (int)p.C ? float_bits(start[i]) : 0;
    }

    // Write the codes of group j to `to(j)`.
    template <int kFours, class To>
    inline void put(const uint32_t (&bits)[kFours][4], const To &to, int plane) const {
#if WHOLE && EXACT && PLANES == 1
#pragma unroll
        for (int j = 0; j < kFours; ++j)
            *(uint32_t *)to(j) = whole_codes(p.division, bits[j], (int)p.zero);
#else
        all_codes(p.division, bits, [&](int j, const uint32_t (&raw)[4]) {
            uint32_t words[PLANES];
            in_bytes(raw, (int)p.zero, words);
            unsigned char *const at = to(j);
            *(uint32_t *)at = words[0];
            if (PLANES == 2) *(uint32_t *)(at + plane) = words[PLANES - 1];
        });
#endif
    }

    // Write the codes of the rows `next`, and return whether `again` must check them for NaN.
    template <class Place>
    inline bool stored(const Values &v, const Next &next, const Place &place, int plane) const {
        const int feature = next.feature((int)p.C);
        put(v.bits, [&](int j) { return place(row_of(next, j), feature); }, plane);
        return may_have_nan(v.bits);
    }
    // Reload the rows one by one, and set the codes and flags of NaN. It rarely runs.
    template <class Place>
    inline void again(const Next &next, const Place &place, int plane) const {
        const int feature = next.feature((int)p.C);
#pragma unroll 1
        for (int j = 0; j < kAhead; ++j) {
            const int row = row_of(next, j);
            uint32_t bits[1][4];
            load_four(bits[0], row, feature);
            if (!without_nan(bits[0])) continue;
            seen[row] = 1;
            put(bits, [&](int) { return place(row, feature); }, plane);
        }
    }

    template <class Place>
    inline void store(const Values &v, const Next &next, const Place &place, int plane) const {
        if (__builtin_expect(stored(v, next, place, plane), 0)) again(next, place, plane);
    }

    // Load values while the previous ones are quantized. The caller has started to load `even`.
    template <bool kFours, class Place>
    inline void quantize(Values &even, const Place &place, int plane) const {
        const int C = (int)p.C;
        Values odd;
        Next now;
        for (;;) {
            Next next = now;
            next.move();
            const bool more = next.there(C);
            if (more) load<kFours>(odd, next);
            store(even, now, place, plane);
            if (!more) break;
            now = next;
            now.move();
            const bool again = now.there(C);
            if (again) load<kFours>(even, now);
            store(odd, next, place, plane);
            if (!again) break;
        }
        __syncwarp();
    }
    inline void load(Values &v, const Next &next) const {
        if (FOURS && p.fours)
            load<true>(v, next);
        else
            load<false>(v, next);
    }
    template <class Place>
    inline void quantize(Values &values, const Place &place, int plane) const {
        if (FOURS && p.fours)
            quantize<true>(values, place, plane);
        else
            quantize<false>(values, place, plane);
    }

    // The same for rows of up to kParts * 128 features. All loads are in flight at once, unless
    // there are more than two parts and four features need four loads.
    template <int kParts>
    struct All {
        static constexpr bool kAtOnce = FOURS || kParts <= 2;
        Values values[kParts * kTurns];

        static inline Next next(int i) {
            Next v;
            v.part = i / kTurns;
            v.row = i % kTurns * kAhead;
            return v;
        }
        template <bool kFours>
        inline void load(const Taken &taken) {
#pragma unroll
            for (int i = 0; i < (kAtOnce ? kParts * kTurns : 1); ++i)
                taken.template load<kFours>(values[i], next(i));
        }
        inline void load(const Taken &taken) {
            if (FOURS && taken.p.fours)
                load<true>(taken);
            else
                load<false>(taken);
            __syncwarp();
        }
        template <class Place>
        inline void quantize(const Taken &taken, const Place &place, int plane) {
            if (!kAtOnce) {
                taken.template quantize<false>(values[0], place, plane);
                return;
            }
            uint32_t nan = 0;
#pragma unroll
            for (int i = 0; i < kParts * kTurns; ++i)
                nan |= (uint32_t)taken.stored(values[i], next(i), place, plane) << i;
            if (__builtin_expect(nan, 0)) {
#pragma unroll 1
                for (int i = 0; i < kParts * kTurns; ++i)
                    if (nan >> i & 1) taken.again(next(i), place, plane);
            }
            __syncwarp();
        }
    };

    inline void flag() const {
        if (nan_at >= 0) p.nan[nan_at] = seen[(int)threadIdx.x % 32] != 0;
    }
};

#endif
