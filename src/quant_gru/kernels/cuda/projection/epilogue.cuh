// The epilogue of an input projection. It requantizes sums of an int8 GEMM to codes of W x minus
// the smallest code. It writes them in the order in which the recurrent kernel reads them.
//
//   COLUMNS: columns of 8 rows whose sums a thread has, laid out as in mma_tiled.cuh
//   PLANES: bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   CODES: 1 if codes of W x use the whole range of a byte, 2 if they need 16 bits, 3 if x has two
//     planes and they use the whole range of 16 bits; 0 or undefined for any codes
//   POWERS: 1 if multipliers may meet the condition of exact_float[1]; with two planes,
//     `finish_exact` then requires it
//   LONG: 1 if sums of two planes may exceed int32
//   STRIP: rows of a tile of the recurrence, NB; 0 or undefined to use the NB of the launch
#ifndef QUANT_GRU_PROJECTED_CUH
#define QUANT_GRU_PROJECTED_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

struct Projected {
    const int8_t *weights;        // (3H, padded)
    const int64_t *folded;        // (3H), bias with zero points folded in
    const double *m;              // (3H), M / 2^k
    const int32_t *folded_bytes;  // `folded` as int32
    const float *m_float;
    const int32_t *exact_float;  // (2), whether int32 and float suffice, see derived.cuh
    void *Wx;                    // [t][tile][group][16 * NB]
    int64_t T, N, H, padded, NB, tiles, groups, wide;
    int64_t lo, hi, code_lo;  // limits and smallest code of W x, minus its zero point
};

#ifndef CODES
#define CODES 0
#endif
#ifndef POWERS
#define POWERS 0
#endif
#ifndef LONG
#define LONG 0
#endif
#ifndef STRIP
#define STRIP 0
#endif
// Whether `finish_exact`, or `finish_held`, requantizes the sums.
inline bool ends_exact(const Projected &p) { return p.exact_float[PLANES == 2 && POWERS] != 0; }
constexpr bool kMayHold = PLANES == 1 && POWERS && CODES == 1;
inline bool ends_held(const Projected &p) { return p.exact_float[1] != 0; }
inline int strip_of(const Projected &p) { return STRIP ? STRIP : (int)p.NB; }
inline bool is_wide(const Projected &p) { return CODES ? CODES >= 2 : p.wide != 0; }

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

// Whether a thread's two rows of a column are four apart, see `row_of_eight`. Then the rows of four
// threads are adjacent, and a store of a warp writes contiguous memory.
inline bool rows_apart(const Projected &p) { return is_wide(p) && strip_of(p) == 8; }

// The offsets of a thread's elements in Wx. `flat` counts the rows of all steps, padded to tiles of
// the recurrence. A thread's two rows by two units are two pairs of adjacent elements.
struct Places {
    int64_t first, second;  // offsets of the two pairs in the first column
    int step;               // from a column to the next
    int flat, next;         // the first row, and the distance to the second
    bool by_unit;           // a pair has two units, not two rows

    inline Places(const Projected &p, int given, int group) {
        const int NB = strip_of(p), log_NB = NB == 8 ? 3 : NB >> 1;
        const int lane8 = threadIdx.x % 32 / 4;
        const int groups = (int)p.groups;
        const bool apart = rows_apart(p);
        flat = apart ? given - (int)threadIdx.x % 4 : given;
        next = apart ? 4 : 1;
        by_unit = NB == 8 || NB == 1;
        first = (((int64_t)(flat >> log_NB) * groups + group) << (4 + log_NB)) +
                stored_at(NB, lane8, 0, flat & (NB - 1));
        second = first + (NB == 1 ? 16 * groups : NB == 4 ? 4 : 2 * next);
        step = 128 * groups;
    }
};

// Store two adjacent elements. The codes of the three gates of an element are one word, or two
// words if codes need 16 bits.
inline void store_where(const Projected &p, bool where, unsigned char *at, const uint2 &one,
                        const uint2 &other) {
    if (is_wide(p)) {
        uint4 all;
        all.x = one.x;
        all.y = one.y;
        all.z = other.x;
        all.w = other.y;
        store_where(where, at, all);
    } else {
        uint2 all;
        all.x = one.x;
        all.y = other.x;
        if (where) *(uint2 *)at = all;
    }
}

// Store elements whose three codes are one word, word(column, i).
template <int kColumns, class Word>
inline void store_words(const Projected &p, int flat, int count, int group, const Word &word) {
    // A store writes four adjacent elements. If a thread's two pairs are not adjacent, the thread
    // exchanges one of them with another thread.
    const Places places(p, flat, group);
    const int NB = strip_of(p), partner = NB == 4 ? 1 : 4;
    const bool alone = NB == 8 || NB == 2;
    const bool later = !alone && (threadIdx.x & partner);
    const int64_t to = later ? places.second - 2 : places.first;
    const int row = flat + (later && NB == 1);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        const uint32_t words[4] = {word(column, 0), word(column, 1), word(column, 2),
                                   word(column, 3)};
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
        store_where(row + 8 * column < count, (uint32_t *)p.Wx + to + column * places.step, all);
    }
}

// Store elements whose codes are codes(column, i).
template <int kColumns, class Codes>
inline void store_all(const Projected &p, int given, int count, int group, const Codes &codes) {
    const Places places(p, given, group);
    const uint32_t size = is_wide(p) ? 8 : 4, step = places.step * size;
    unsigned char *first = (unsigned char *)p.Wx + places.first * size;
    unsigned char *second = (unsigned char *)p.Wx + places.second * size;
    // With 16-bit codes, two rows of a thread take 32 bytes, and each of two stores would write
    // half a memory sector. So two threads together store all elements of one, then all of the
    // other.
    const bool swaps = is_wide(p) && strip_of(p) == 2, odd = threadIdx.x & 4;
    if (swaps) {
        first = odd ? second - 32 : first;
        second = first + 32;
    }
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
        const int row = places.flat + 8 * column;
        const uint2 v[4] = {codes(column, 0), codes(column, 1), codes(column, 2), codes(column, 3)};
        uint2 early[2] = {v[0], places.by_unit ? v[2] : v[1]};
        uint2 late[2] = {places.by_unit ? v[1] : v[2], v[3]};
        if (swaps) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t x = shuffled(odd ? early[i].x : late[i].x, 4);
                const uint32_t y = shuffled(odd ? early[i].y : late[i].y, 4);
                early[i].x = odd ? x : early[i].x;
                early[i].y = odd ? y : early[i].y;
                late[i].x = odd ? late[i].x : x;
                late[i].y = odd ? late[i].y : y;
            }
        }
        const uint64_t on = (uint64_t)step * (uint32_t)column;
        store_where(p, row < count, first + on, early[0], early[1]);
        // tiles of two or four rows have an even number of rows
        store_where(p, row + places.next < count, second + on, late[0], late[1]);
    }
}

template <class Real, int kColumns = COLUMNS, class Total, class Factor>
inline void finish(const Projected &p, int flat, int count, int group, const Total &total,
                   const Factor (&m)[3][2]) {
    typedef Magic<Real> R;
    // `pinned` keeps the compiler from computing the limits before the GEMM, which needs registers
    const Real lo = (Real)(int)pinned((uint32_t)p.lo) + R::number();
    const Real hi = (Real)(int)pinned((uint32_t)p.hi) + R::number();
    const uint32_t offset = (uint32_t)p.code_lo + Bits<Real>::none();
    const auto rounded = [&](int gate, int column, int i) {
        return round_term((Real)total(gate, column, i), (Real)m[gate][i / 2]);
    };
    const auto limited = [&](int gate, int column, int i) {
        return Bits<Real>::limited(rounded(gate, column, i), lo, hi);
    };
    if (sizeof(Real) == 4 && !is_wide(p)) {
        // if codes use the whole range of a byte, an instruction that saturates applies the limits
        const bool whole = CODES ? CODES == 1 : (int)p.hi - (int)p.lo == 255;
        const auto stored = [&](int gate, int column, int i) {
            return (int)(Bits<Real>::of(rounded(gate, column, i)) - offset);
        };
        if (whole)
            store_words<kColumns>(p, flat, count, group, [&](int column, int i) {
                const uint32_t last = saturated_bytes(stored(2, column, i), 0, 0);
                return saturated_bytes(stored(0, column, i), stored(1, column, i), last);
            });
        else
            store_words<kColumns>(p, flat, count, group, [&](int column, int i) {
                return limited(0, column, i) + (limited(1, column, i) << 8) +
                       (limited(2, column, i) << 16) - offset * 65793u;
            });
        return;
    }
    // The bits of sums are shifted and added before their offset is subtracted; modulo 2^32 the
    // result is the same.
    const auto codes = [&](int column, int i) {
        const uint32_t first = limited(0, column, i), last = limited(2, column, i);
        const uint32_t second = limited(1, column, i);
        uint2 v;
        v.x = is_wide(p) ? first + (second << 16) - offset * 65537u
                         : first + (second << 8) + (last << 16) - offset * 65793u;
        v.y = last - offset;
        return v;
    };
    store_all<kColumns>(p, flat, count, group, codes);
}

// The word v + 2^31 is the low half of the double v + kMore.
constexpr double kMore = 4503599627370496. + 2147483648.;
constexpr uint32_t kSign = 0x80000000u;
inline double word(uint32_t low) { return bits_as_double((int64_t)(0x4330000000000000ull | low)); }

// Return the initial value of a channel's sums in the last plane. Exact sums of two planes are
// offset by 2^31, so that their bits are the low half of a double.
inline int first_of(int folded, bool exact) {
    if (PLANES == 1) return folded;
    return exact ? (int)((uint32_t)folded + kSign) : 0;
}

// Requantize if `ends_exact` is true. sum(plane, gate, column, i) was initialized with `first_of`.
#if PLANES == 1
template <class Sum>
inline void finish_exact(const Projected &p, int flat, int count, int group, const Sum &sum,
                         const float (&m)[3][2]) {
    const auto total = [&](int gate, int column, int i) { return sum(0, gate, column, i); };
    finish<float>(p, flat, count, group, total, m);
}
#else
template <class Sum>
inline void finish_exact(const Projected &p, int flat, int count, int group, const Sum &sum,
                         const float (&m)[3][2]) {
    typedef Magic<double> R;
    const int lo = (int)p.lo, hi = (int)p.hi, code_lo = (int)p.code_lo;
    // For CODES == 3, a saturating instruction applies the limits. Adding an even number before
    // rounding does not change ties: subtract the smallest code or, if it is odd, negate the value
    // and add the largest code. Rules of several instructions subtract the smallest one at the end.
    constexpr bool kFolds = QG_RULE == QG_HALF_EVEN || QG_RULE == QG_FLOOR;
    const bool whole = CODES == 3;
    const bool flipped = QG_RULE == QG_HALF_EVEN && whole && code_lo & 1;
    const uint32_t flip = flipped ? 0xFFFFFFFFu : 0;
    const int added = flipped ? hi : whole && kFolds ? -code_lo : 0;
    const double number = R::number() + (double)added;
    double factor[3][2], rest[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const float v = m[i / 2][i % 2];
        factor[i / 2][i % 2] = (double)(flipped ? -v : v);
        rest[i / 2][i % 2] =
            POWERS && kFolds ? R::fma(-kMore, factor[i / 2][i % 2], number) : number;
    }
    const auto rounded = [&](int gate, int column, int i) {
        const uint32_t first = (uint32_t)sum(0, gate, column, i);
        const uint32_t second = (uint32_t)sum(1, gate, column, i);
        double total = LONG
                           ? R::plus(R::fma(word(first ^ kSign), 256., -256. * kMore), word(second))
                           : word((first << 8) + second);
        if (!POWERS || !kFolds) total = R::plus(total, -kMore);
        if (!kFolds) return R::integer(round_term(total, factor[gate][i / 2]));
        if (QG_RULE == QG_FLOOR)
            return R::integer(R::fma_down(total, factor[gate][i / 2], rest[gate][i / 2]));
        return R::integer(R::fma(total, factor[gate][i / 2], rest[gate][i / 2]));
    };
    const auto codes = [&](int column, int i) {
        int v[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            v[gate] = rounded(gate, column, i);
            if (!whole) v[gate] = (v[gate] < lo ? lo : v[gate] > hi ? hi : v[gate]) - code_lo;
            if (whole && !kFolds) v[gate] -= code_lo;
        }
        uint2 words;
        if (whole) {
            words.x = saturated_halves(v[0], v[1]) ^ flip;
            words.y = saturated_halves(v[2], 0) ^ flip >> 16;
        } else {
            words.x = is_wide(p) ? v[0] + (v[1] << 16) : v[0] + (v[1] << 8) + (v[2] << 16);
            words.y = v[2];
        }
        return words;
    };
    store_all<COLUMNS>(p, flat, count, group, codes);
}
#endif

// Requantize if `ends_held` is true: multipliers are powers of two, and float represents the
// unrounded result exactly. Then a conversion rounds, and one instruction clamps two results.
// sum(plane, gate, column, i) lacks the bias.
//
// With ties to even the instruction clamps to -128 and 127. The number added before rounding is
// even, so that ties round to the same code. It moves the smallest code to -128 or, if that code is
// odd, the negated largest code. With other rules it clamps to 0 and 255: the smallest code is
// subtracted, and half of a code is added; see `round_product`. With QG_HALF_AWAY, the number below
// it turns ties of negative results down, and nothing else: it is at most a multiplier less.
// See weights/derived.cuh for the magnitudes allowed.
template <class Sum>
inline void finish_held(const Projected &p, int flat, int count, int group, const Sum &sum,
                        const float (&m)[3][2], const int (&folded)[3][2]) {
    typedef Magic<float> R;
    constexpr bool kEven = QG_RULE == QG_HALF_EVEN, kAway = QG_RULE == QG_HALF_AWAY;
    const bool negative = kEven && (int)p.lo & 1;
    const uint32_t flip = !kEven ? 0 : negative ? 0x7F7F7Fu : 0x808080u;
    const float added = kEven ? (float)(negative ? (int)p.hi - 128 : -128 - (int)p.lo)
                              : (float)-(int)p.lo + (QG_RULE == QG_FLOOR ? 0.f : 0.5f);
    float factor[3][2], rest[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const float v = m[i / 2][i % 2], bias = (float)folded[i / 2][i % 2];
        factor[i / 2][i % 2] = negative ? -v : v;
        // if rounded, this lacks the half of a multiplier above 1/2, whose results have no ties
        rest[i / 2][i % 2] = kEven   ? R::fma(bias, factor[i / 2][i % 2], added)
                             : kAway ? R::times(bias, v)
                                     : R::fma_down(bias, v, added);
    }
    const auto rounded = [&](float total, float factor, float rest) {
        if (kEven) return __float2int_rn(R::fma(total, factor, rest));
        if (!kAway) return __float2int_rd(R::fma_down(total, factor, rest));
        const float v = R::fma(total, factor, rest);
        const int below = __float_as_int(v) >> 31;
        return __float2int_rd(R::plus_down(v, __int_as_float(__float_as_int(added) + below)));
    };
    // 0, hidden from the compiler, which would emit more instructions for a constant
    const int nothing = __float2int_rn((float)(int)p.wide);
    store_words<COLUMNS>(p, flat, count, group, [&](int column, int i) {
        int v[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            v[gate] =
                rounded((float)sum(0, gate, column, i), factor[gate][i / 2], rest[gate][i / 2]);
        const uint32_t last = saturated_bytes<kEven>(v[2], nothing, 0);
        return saturated_bytes<kEven>(v[0], v[1], last) ^ flip;
    });
}

// The weight rows of this thread's units by gate. The first unit is `unit`.
typedef int Channels[3][2];
inline void find_channels(const Projected &p, int unit, Channels &channels) {
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int at = unit + i % 2 * 8;
        channels[i / 2][i % 2] = i / 2 * (int)p.H + (at < p.H ? at : 0);
    }
}

// Requantize any sums in double. With two planes, sum(plane, gate, column, i) lacks the bias. It
// rarely runs, so code exists for one column only: sums move through that column's registers.
template <class Sum>
inline void finish_any(const Projected &p, int flat, int count, int group, const Channels &channels,
                       const Sum &sum) {
    int moving[PLANES][3][COLUMNS][4];
#pragma unroll
    for (int i = 0; i < 12 * COLUMNS * PLANES; ++i)
        moving[i / (12 * COLUMNS)][i / 4 % 3][i / 12 % COLUMNS][i % 4] =
            sum(i / (12 * COLUMNS), i / 4 % 3, i / 12 % COLUMNS, i % 4);
#pragma unroll 1
    for (int column = 0; column < COLUMNS; ++column) {
        double m[3][2], multiples[3][2];
        uint32_t rest[3][2];
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const int channel = channels[i / 2][i % 2];
            m[i / 2][i % 2] = p.m[channel];
            // subtract the constants of both `word` calls with the bias's multiple of 256
            const int64_t folded = PLANES == 2 ? p.folded[channel] : 0;
            multiples[i / 2][i % 2] =
                Magic<double>::fma((double)(folded >> 8), 256., -256. * kMore - kMore);
            rest[i / 2][i % 2] = ((uint32_t)folded & 255) + kSign;
        }
        // integers below 2^53 are exact
        const auto total = [&](int gate, int, int i) {
            const uint32_t low = (uint32_t)moving[PLANES - 1][gate][0][i];
            if (PLANES == 1) return Magic<double>::plus(word(low ^ kSign), -kMore);
            const double first = word((uint32_t)moving[0][gate][0][i] ^ kSign);
            return Magic<double>::plus(Magic<double>::fma(first, 256., multiples[gate][i / 2]),
                                       word(low + rest[gate][i / 2]));
        };
        finish<double, 1>(p, flat + 8 * column, count, group, total, m);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
            for (int i = 0; i < 12 * (COLUMNS - 1); ++i)
                moving[plane][i / 4 % 3][i / 12][i % 4] =
                    moving[plane][i / 4 % 3][i / 12 + 1][i % 4];
    }
}

#endif
