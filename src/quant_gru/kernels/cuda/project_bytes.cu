// The input projection of weights of bytes in one kernel: from codes of x to codes of W x, less
// their smallest, in the order in which the recurrent kernel reads them.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES: the block's tile, see multiply.cuh
#include "cell.cuh"
#include "multiply.cuh"

typedef Multiplier<UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES> Tile;

struct Numbers {
    const int8_t *bytes;    // (PLANES, T * N, padded)
    const int8_t *weights;  // (3H, padded)
    const int64_t *folded;  // (3H), bias and zero points; for one plane null
    const double *m;        // (3H), M / 2^k
    // for one plane
    const int32_t *folded_bytes;
    const float *m_float;
    const int32_t *exact_float;  // whether float holds every accumulator and multiplier
    void *Wx;                    // [t][tile][group][16 * NB]
    int64_t T, N, H, padded, NB, tiles, groups, wide;
    int64_t lo, hi, code_lo;  // limits of W x less its zero point, and its smallest code
};

// Two elements that lie side by side, each of three gates.
struct Two {
    uint32_t v[2][3];
};

template <class Real>
struct Bits;
template <>
struct Bits<float> {
    static inline uint32_t of(float v) { return (uint32_t)__float_as_int(v); }
    static inline uint32_t none() { return 0x4B400000u; }
};
template <>
struct Bits<double> {
    static inline uint32_t of(double v) { return (uint32_t)__double2loint(v); }
    static inline uint32_t none() { return 0; }
};

// Where the elements of a thread go. Rows of the grid's tiles are padded to those of the
// recurrence, `flat` counts them: two rows, one after the other, and two units make two pairs of
// neighbours.
struct Places {
    int64_t first, second, step;  // of the first 8 rows; from 8 rows to the next
    bool by_unit;                 // pairs are of two units, or of two rows

    inline Places(const Numbers &p, int64_t flat, int group) {
        const int NB = (int)p.NB, log_NB = NB == 8 ? 3 : NB >> 1;
        const int lane8 = threadIdx.x % 32 / 4, n = (int)flat & (NB - 1);
        const int64_t size = 16 * NB, tile = flat >> log_NB;
        by_unit = NB == 8 || NB == 1;
        first = (tile * p.groups + group) * size + stored_at(NB, lane8, 0, n);
        if (NB == 1)
            second = first + p.groups * size;
        else
            second = first + (NB == 4 ? 4 : 2);
        step = 128 * p.groups;
    }
};

// Codes of three gates side by side, from numbers that have the magic number inside. Bits of sums
// are added, multiplied and only then rid of their offset: in 32 bits it comes out the same.
inline void store(const Numbers &p, int64_t at, const Two &two, uint32_t offset) {
    if (p.wide) {
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

template <class Real, class Total, class Factor>
inline void finish(const Numbers &p, int64_t flat, int64_t count, int group, const Total &total,
                   const Factor (&m)[3][2]) {
    typedef Magic<Real> R;
    const Real lo = (Real)p.lo + R::number(), hi = (Real)p.hi + R::number();
    const uint32_t offset = (uint32_t)p.code_lo + Bits<Real>::none();
    const Places places(p, flat, group);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
        uint32_t v[4][3];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                v[i][gate] = Bits<Real>::of(R::limit(
                    round_term((Real)total(gate, column, i), (Real)m[gate][i / 2]), lo, hi));
        Two first, second;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            first.v[0][gate] = v[0][gate];
            first.v[1][gate] = places.by_unit ? v[2][gate] : v[1][gate];
            second.v[0][gate] = places.by_unit ? v[1][gate] : v[2][gate];
            second.v[1][gate] = v[3][gate];
        }
        const int64_t row = flat + 8 * column;
        if (row < count) store(p, places.first + column * places.step, first, offset);
        // tiles of several rows have an even count
        if (row + 1 < count) store(p, places.second + column * places.step, second, offset);
    }
}

// A block: some units of some rows, units first.
extern "C" __global__ void __launch_bounds__(Tile::kThreads)
    project_bytes(const __grid_constant__ Numbers p) {
    let_next_start();
    QG_SHARED(memory);
    const int unit_blocks = (int)((p.groups * 16 + Tile::kUnits - 1) / Tile::kUnits);
    const int64_t first_unit = (int64_t)(blockIdx.x % unit_blocks) * Tile::kUnits;
    const int64_t first_row = (int64_t)(blockIdx.x / unit_blocks) * Tile::kRows;
    const int64_t H = p.H, padded_N = p.tiles * p.NB, count = p.T * padded_N;
    const auto rows_of = [&](int64_t plane) {
        return [&p, first_row, padded_N, count, plane](int i) -> const int8_t * {
            const int64_t flat = first_row + i;
            if (flat >= count) return nullptr;
            const int t = (int)((uint32_t)flat / (uint32_t)padded_N);
            const int n = (int)(flat - t * padded_N);
            const int64_t row = (plane * p.T + t) * p.N + n;
            return n < p.N ? p.bytes + row * p.padded : nullptr;
        };
    };
    const int64_t flat = first_row + Tile::row(0, 0);
    const int group = (int)(first_unit + Tile::unit(0)) / 16;
    int64_t channels[3][2];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int64_t unit = first_unit + Tile::unit(2 * row8);
            channels[gate][row8] = gate * H + (unit < H ? unit : 0);
        }

    Tile::Sums sums[PLANES];
#if PLANES == 1
    float m[3][2];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
        for (int row8 = 0; row8 < 2; ++row8) {
            const int folded = p.folded_bytes[channels[gate][row8]];
            m[gate][row8] = p.m_float[channels[gate][row8]];
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                sums[0][gate][column][2 * row8] = sums[0][gate][column][2 * row8 + 1] = folded;
        }
    const bool exact = *p.exact_float != 0;
    Tile::add<false>(sums[0], memory, p.weights, H, first_unit, p.padded, rows_of(0));
    if (group >= p.groups) return;
    const auto total = [&](int gate, int column, int i) { return sums[0][gate][column][i]; };
    if (exact) {
        finish<float>(p, flat, count, group, total, m);
        return;
    }
#else
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll
        for (int i = 0; i < 12 * COLUMNS; ++i)
            sums[plane][i / (4 * COLUMNS)][i / 4 % COLUMNS][i % 4] = 0;
    Tile::add<false>(sums[0], memory, p.weights, H, first_unit, p.padded, rows_of(0));
    Tile::add<false>(sums[1], memory, p.weights, H, first_unit, p.padded, rows_of(1));
    if (group >= p.groups) return;
    int64_t folded[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) folded[i / 2][i % 2] = p.folded[channels[i / 2][i % 2]];
    const auto total = [&](int gate, int column, int i) {
        return 256 * (int64_t)sums[0][gate][column][i] + sums[1][gate][column][i] +
               folded[gate][i / 2];
    };
#endif
    double wide_m[3][2];
#pragma unroll
    for (int i = 0; i < 6; ++i) wide_m[i / 2][i % 2] = p.m[channels[i / 2][i % 2]];
    finish<double>(p, flat, count, group, total, wide_m);
}
