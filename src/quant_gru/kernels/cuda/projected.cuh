// The end of an input projection: sums of products of bytes to codes of W x, less their smallest,
// in the order in which the recurrent kernel reads them.
//
//   COLUMNS: of 8 rows each, whose sums a thread has, laid out as in multiply.cuh
//   PLANES: bytes of a code of x: x, or 256 * first + second + 128
//   CODES: 1 where codes of W x are whole bytes, 2 where they are wide, 0 or none for any
#ifndef QUANT_GRU_PROJECTED_CUH
#define QUANT_GRU_PROJECTED_CUH

#include "cell.cuh"
#include "ptx.cuh"

struct Projected {
    const int8_t *weights;  // (3H, padded)
    const int64_t *folded;  // (3H), bias and zero points; for one plane of x null
    const double *m;        // (3H), M / 2^k
    // for one plane
    const int32_t *folded_bytes;
    const float *m_float;
    const int32_t *exact_float;  // whether float holds every accumulator and multiplier
    void *Wx;                    // [t][tile][group][16 * NB]
    int64_t T, N, H, padded, NB, tiles, groups, wide;
    int64_t lo, hi, code_lo;  // limits of W x less its zero point, and its smallest code
};

#ifndef CODES
#define CODES 0
#endif
inline bool is_wide(const Projected &p) { return CODES ? CODES == 2 : p.wide != 0; }

// Two elements that lie side by side, each of three gates.
struct Two {
    uint32_t v[2][3];
};

template <class Real>
struct Bits;
template <>
struct Bits<float> {
    static inline uint32_t of(float v) { return (uint32_t)__float_as_int(v); }
    static inline uint32_t limited(float v, float lo, float hi) {
        return of(Magic<float>::limit(v, lo, hi));
    }
    static inline uint32_t none() { return 0x4B400000u; }
};
template <>
struct Bits<double> {
    static inline uint32_t of(double v) { return (uint32_t)__double2loint(v); }
    static inline uint32_t limited(double v, double lo, double hi) {
        const uint32_t low = v < lo ? of(lo) : of(v);
        return v > hi ? of(hi) : low;
    }
    static inline uint32_t none() { return 0; }
};

// Where the elements of a thread go. Rows of the grid's tiles are padded to those of the
// recurrence, `flat` counts them: two rows, one after the other, and two units make two pairs of
// neighbours.
struct Places {
    int64_t first, second;  // of the first 8 rows
    int step;               // from 8 rows to the next
    bool by_unit;           // pairs are of two units, or of two rows

    inline Places(const Projected &p, int flat, int group) {
        const int NB = (int)p.NB, log_NB = NB == 8 ? 3 : NB >> 1;
        const int lane8 = threadIdx.x % 32 / 4, n = flat & (NB - 1);
        const int groups = (int)p.groups;
        by_unit = NB == 8 || NB == 1;
        first = (((int64_t)(flat >> log_NB) * groups + group) << (4 + log_NB)) +
                stored_at(NB, lane8, 0, n);
        second = first + (NB == 1 ? 16 * groups : NB == 4 ? 4 : 2);
        step = 128 * groups;
    }
};

// Codes of three gates side by side, from numbers that have the magic number inside. Bits of sums
// are added, multiplied and only then rid of their offset: in 32 bits it comes out the same.
inline void store(const Projected &p, int64_t at, const Two &two, uint32_t offset) {
    if (is_wide(p)) {
        uint4 all;
        all.x = two.v[0][0] + (two.v[0][1] << 16) - offset * 65537u;
        all.y = two.v[0][2] - offset;
        all.z = two.v[1][0] + (two.v[1][1] << 16) - offset * 65537u;
        all.w = two.v[1][2] - offset;
        *(uint4 *)((uint2 *)p.Wx + at) = all;
    } else {
        uint2 all;
        all.x = two.v[0][0] + (two.v[0][1] << 8) + (two.v[0][2] << 16) - offset * 65793u;
        all.y = two.v[1][0] + (two.v[1][1] << 8) + (two.v[1][2] << 16) - offset * 65793u;
        *(uint2 *)((uint32_t *)p.Wx + at) = all;
    }
}

// kSome: columns may have no rows, and are left out.
template <class Real, bool kSome = false, int kColumns = COLUMNS, class Total, class Factor>
inline void finish(const Projected &p, int flat, int count, int group, const Total &total,
                   const Factor (&m)[3][2]) {
    typedef Magic<Real> R;
    // not worked out before the tiles: they need the registers
    const Real lo = (Real)(int)pinned((uint32_t)p.lo) + R::number();
    const Real hi = (Real)(int)pinned((uint32_t)p.hi) + R::number();
    const uint32_t offset = (uint32_t)p.code_lo + Bits<Real>::none();
    const Places places(p, flat, group);
    const auto rounded = [&](int gate, int column, int i) {
        return round_term((Real)total(gate, column, i), (Real)m[gate][i / 2]);
    };
    const auto limited = [&](int gate, int column, int i) {
        return Bits<Real>::limited(rounded(gate, column, i), lo, hi);
    };
    if (sizeof(Real) == 4 && !is_wide(p)) {
        // Pairs of neighbours make four where both of a thread are side by side, and otherwise
        // with a pair of another thread, which takes one in return.
        const int NB = (int)p.NB, partner = NB == 4 ? 1 : 4;
        const bool alone = NB == 8 || NB == 2;
        const bool later = !alone && (threadIdx.x & partner);
        const int64_t to = later ? places.second - 2 : places.first;
        const int row = flat + (later && NB == 1);
        // limits of a whole byte are those of an instruction
        const bool whole = CODES ? CODES == 1 : (int)p.hi - (int)p.lo == 255;
        const auto stored = [&](int gate, int column, int i) {
            return (int)(Bits<Real>::of(rounded(gate, column, i)) - offset);
        };
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            if (kSome && (flat & ~7) + 8 * column >= count) break;
            uint32_t words[4];
            if (whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t last = saturated_bytes(stored(2, column, i), 0, 0);
                    words[i] = saturated_bytes(stored(0, column, i), stored(1, column, i), last);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = limited(0, column, i) + (limited(1, column, i) << 8) +
                               (limited(2, column, i) << 16) - offset * 65793u;
            }
            uint4 all;
            all.x = words[0];
            all.y = places.by_unit ? words[2] : words[1];
            all.z = places.by_unit ? words[1] : words[2];
            all.w = words[3];
            if (!alone) {
                const uint32_t low = shuffled(later ? all.x : all.z, partner);
                const uint32_t high = shuffled(later ? all.y : all.w, partner);
                all.x = later ? low : all.x;
                all.y = later ? high : all.y;
                all.z = later ? all.z : low;
                all.w = later ? all.w : high;
            }
            if (row + 8 * column < count)
                *(uint4 *)((uint32_t *)p.Wx + to + column * places.step) = all;
        }
        return;
    }
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        if (kSome && (flat & ~7) + 8 * column >= count) break;
        uint32_t v[4][3];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) v[i][gate] = limited(gate, column, i);
        Two first, second;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            first.v[0][gate] = v[0][gate];
            first.v[1][gate] = places.by_unit ? v[2][gate] : v[1][gate];
            second.v[0][gate] = places.by_unit ? v[1][gate] : v[2][gate];
            second.v[1][gate] = v[3][gate];
        }
        const int row = flat + 8 * column;
        if (row < count) store(p, places.first + column * places.step, first, offset);
        // tiles of several rows have an even count
        if (row + 1 < count) store(p, places.second + column * places.step, second, offset);
    }
}

// Rows of the weights, by gate, of this thread's units, the first of which is `unit`.
typedef int Channels[3][2];
inline void find_channels(const Projected &p, int unit, Channels &channels) {
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int at = unit + i % 2 * 8;
        channels[i / 2][i % 2] = i / 2 * (int)p.H + (at < p.H ? at : 0);
    }
}

// The same for any sums, in doubles; sum(plane, gate, column, i) lacks biases of two planes.
template <bool kSome = false, class Sum>
inline void finish_any(const Projected &p, int flat, int count, int group, const Channels &channels,
                       const Sum &sum) {
#if PLANES == 2
    // A word is the low half of a double 2^52 + 2^31 more than it. What both planes have too much
    // goes with the multiples of 256 of the bias, and a sum of such is exact however large.
    constexpr double kMore = 4503599627370496. + 2147483648.;
    double multiples[3][2];
    uint32_t rest[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int64_t folded = p.folded[channels[i / 2][i % 2]];
        multiples[i / 2][i % 2] =
            Magic<double>::fma((double)(folded >> 8), 256., -256. * kMore - kMore);
        rest[i / 2][i % 2] = ((uint32_t)folded & 255) + 0x80000000u;
    }
    const auto word = [](uint32_t low) {
        return bits_as_double((int64_t)(0x4330000000000000ull | low));
    };
    const auto total = [&](int gate, int column, int i) {
        typedef Magic<double> R;
        const double first = word((uint32_t)sum(0, gate, column, i) ^ 0x80000000u);
        const double second = word((uint32_t)sum(1, gate, column, i) + rest[gate][i / 2]);
        return R::plus(R::fma(first, 256., multiples[gate][i / 2]), second);
    };
    double m[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) m[i / 2][i % 2] = p.m[channels[i / 2][i % 2]];
    finish<double, kSome>(p, flat, count, group, total, m);
#else
    // rarely run, so there is one column of code: sums move through the first one's registers
    int moving[3][COLUMNS][4];
#pragma unroll
    for (int i = 0; i < 12 * COLUMNS; ++i)
        moving[i / 4 % 3][i / 12][i % 4] = sum(0, i / 4 % 3, i / 12, i % 4);
    const auto total = [&](int gate, int, int i) { return moving[gate][0][i]; };
#pragma unroll 1
    for (int column = 0; column < COLUMNS; ++column) {
        double m[3][2];
#pragma unroll
        for (int i = 0; i < 6; ++i) m[i / 2][i % 2] = p.m[channels[i / 2][i % 2]];
        finish<double, kSome, 1>(p, flat + 8 * column, count, group, total, m);
#pragma unroll
        for (int i = 0; i < 12 * (COLUMNS - 1); ++i)
            moving[i / 4 % 3][i / 12][i % 4] = moving[i / 4 % 3][i / 12 + 1][i % 4];
    }
#endif
}

#endif
