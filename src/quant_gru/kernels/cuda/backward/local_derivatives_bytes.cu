// The derivatives of every element and step, if all weights and activations are bytes. The kernel
// computes both GEMMs, and processes the gates while the sums are in registers.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, QG_ZONEOUT, TZ, TR, TG: see recurrence/persistent.cu
//   UNIT_WARPS  units per block divided by 16
//   GROUPS      groups of warps per block; each group has rows of its own
//   HALF, DIRS  see local_derivatives.cu
#include "backward/element_derivatives.cuh"
#include "projection/mma_resident_weights.cuh"

typedef Resident<UNIT_WARPS, GROUPS, 4, 4> Tile;
constexpr int kElements = Tile::kRows / 4;  // per thread and unit
static_assert(kElements == 8, "states of a unit are two words");

struct Product {
    const int8_t *weights;    // (3H, padded)
    const Channel *channels;  // (3H)
    PassingRows passing;      // (rows, padded): bytes of x, or of the previous state
    double lo, hi;            // limits of the result minus its zero point
    float low, high;          // the same plus the magic number
};

struct Numbers {
    Product W, R;
    const int64_t *lengths;    // (N) or null
    const uint8_t *held;       // (T * N, H) or null
    Derivatives *of_R, *of_W;  // (T * N, H): for the previous state and R h; for W x
    int64_t N, H, rows;
    int64_t share;   // rows of a group, a multiple of 8
    int64_t h_less;  // added to bytes of states, gives zero-point-free codes
    Gates gates;
};
struct Pair {
    Numbers d[DIRS];
};

// Requantizes sums of a channel to zero-point-free codes. kSingle: float arithmetic is exact.
template <bool kSingle>
struct Column {
    int folded;
    float m;
    inline void open(const Channel &c) {
        folded = (int)c.folded;
        m = c.m_float;
    }
    inline Watched operator()(const Product &p, int sum) const {
        return rounded((float)(sum + folded), m, p.low, p.high);
    }
};
template <>
struct Column<false> {
    int64_t folded;
    double m;
    inline void open(const Channel &c) {
        folded = c.folded;
        m = c.m;
    }
    inline Watched operator()(const Product &p, int sum) const {
        const double magic = Magic<double>::number();
        return rounded((double)(sum + folded), m, p.lo + magic, p.hi + magic);
    }
};

struct Readers {
    Reader<TZ> z;
    Reader<TR> r;
    Reader<TG> g;
};

// Inputs of a tile other than its sums: bytes of states, 4 rows per word, and a bit for each row
// that keeps its state.
struct Beside {
    uint32_t h[2][2];
    uint32_t stays[2];
};

inline Beside beside(const Numbers &p, int first_unit, int first, int last) {
    Beside found = {};
    const int H = (int)p.H, N = (int)p.N;
    uint8_t h[2][kElements];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int unit = first_unit + Tile::unit(2 * half);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const int row = first + Tile::row(i / 2, i % 2);
            const bool there = row < last && unit < H;
            h[half][i] =
                there ? ((const uint8_t *)p.R.passing.rows)[row * p.R.passing.padded + unit] : 0;
        }
    }
    if (p.lengths) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const int row = first + Tile::row(i / 2, i % 2), t = row / N;
            if (row < last && t >= p.lengths[row - t * N]) found.stays[0] |= 1 << i;
        }
        found.stays[1] = found.stays[0];
    }
    if (p.held) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int unit = first_unit + Tile::unit(2 * half);
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                const int row = first + Tile::row(i / 2, i % 2);
                if (row < last && unit < H && p.held[(int64_t)row * H + unit])
                    found.stays[half] |= 1 << i;
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < kElements; ++i)
            found.h[half][i / 4] |= (uint32_t)h[half][i] << (8 * (i % 4));
    return found;
}

// Store a tile's derivatives: units from `first_unit` on, rows from `first` to before `last`.
template <bool kSingle>
inline void put(const Numbers &p, const Readers &tables, Tile::Sums &Wx, Tile::Sums &Rh, Beside &by,
                int first_unit, int first, int last) {
    constexpr int kColumns = Tile::kRows / 8;
    // the variant that rarely runs has code for one column: sums move through that one's registers
    constexpr bool kMoving = !kSingle && sizeof(Real) == 4;
    const int H = (int)p.H, less = (int)p.h_less;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const int unit = first_unit + Tile::unit(2 * half);
        const bool there = unit < H;
        const int64_t at = (int64_t)(first + Tile::row(0, 0)) * H + unit;
        Derivatives *const of_R = p.of_R + at, *const of_W = p.of_W + at;
        Column<kSingle> of_Wx[3], of_Rh[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            const int channel = gate * H + (there ? unit : 0);
            of_Wx[gate].open(p.W.channels[channel]);
            of_Rh[gate].open(p.R.channels[channel]);
        }
#pragma unroll(kMoving ? 1 : kColumns)
        for (int column = 0; column < kColumns; ++column) {
            if (first + column * 8 >= last) break;
            const int place = kMoving ? 0 : column;
            const uint32_t states = column < 2 ? by.h[0][0] : by.h[0][1];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int i = column * 2 + j, row = first + Tile::row(column, j);
                Watched by_x[3], by_h[3];
#pragma unroll
                for (int gate = 0; gate < 3; ++gate) {
                    by_x[gate] = of_Wx[gate](p.W, Wx[gate][place][j]);
                    by_h[gate] = of_Rh[gate](p.R, Rh[gate][place][j]);
                }
                const int h = (int)(int8_t)(states >> (8 * (i % 4))) + less;
                ElementDerivatives found = derivatives_of_element(
                    p.gates, tables.z, tables.r, tables.g, by_x, by_h, (Real)h, p.held != nullptr);
                if (by.stays[0] >> i & 1) found = derivatives_of_staying();
                if (there && row < last) {
                    of_R[(column * 8 + j) * H] = found.of_R;
                    of_W[(column * 8 + j) * H] = found.of_W;
                }
            }
#pragma unroll
            for (int i = 0; kMoving && i < 6 * (kColumns - 1); ++i) {
                const int gate = i / (2 * (kColumns - 1)), to = i / 2 % (kColumns - 1);
                Wx[gate][to][i % 2] = Wx[gate][to + 1][i % 2];
                Rh[gate][to][i % 2] = Rh[gate][to + 1][i % 2];
            }
        }
        // move the other half to the registers of the first, to avoid a second copy of the code
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                Wx[gate][i / 2][i % 2] = Wx[gate][i / 2][i % 2 + 2];
                Rh[gate][i / 2][i % 2] = Rh[gate][i / 2][i % 2 + 2];
            }
        by.h[0][0] = by.h[1][0];
        by.h[0][1] = by.h[1][1];
        by.stays[0] = by.stays[1];
    }
}

// A block processes some units, and each of its groups some rows. Blocks with consecutive indices
// have the same rows.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, 384 / Tile::kThreads)
    derivatives_bytes(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y % DIRS];
    QG_SHARED(memory);
    const Cell<Real> &c = p.gates.cell;
    Readers tables;
    unsigned char *const end = tables.g.open(c.g, tables.r.open(c.r, tables.z.open(c.z, memory)));
    unsigned char *const rings = memory + ((int)(end - memory) + 127) / 128 * 128;
    unsigned char *const kept_W = rings + GROUPS * Tile::kRingBytes;
    unsigned char *const kept_R = kept_W + Tile::kept_bytes(p.W.passing.padded);
    const int H = (int)p.H, across = (H + Tile::kUnits - 1) / Tile::kUnits;
    const int first_unit = (int)blockIdx.x % across * Tile::kUnits;
    Tile::keep(kept_W, p.W.weights, H, first_unit, p.W.passing.padded);
    Tile::keep(kept_R, p.R.weights, H, first_unit, p.R.passing.padded);
    copies_commit();
    bool single = sizeof(Real) == 4;
    for (int i = 0; i < 6; ++i) {
        const int unit = first_unit + Tile::unit(i % 2 * 2);
        if (unit >= H) continue;
        const int channel = i / 2 * H + unit;
        single = single && p.W.channels[channel].exact && p.R.channels[channel].exact;
    }
    single = !any_lane(!single);
    copies_wait<0>();
    __syncthreads();

    const int64_t from = ((int64_t)blockIdx.x / across * GROUPS + Tile::group()) * p.share;
    if (from >= p.rows) return;
    const int last = (int)(from + p.share < p.rows ? from + p.share : p.rows);
    Tile::Passing passing(rings, p.W.passing, p.R.passing, (int)from, last);
    for (int first = (int)from; first < last; first += Tile::kRows) {
        Tile::Sums Wx = {}, Rh = {};
        passing.add(Wx, kept_W, p.W.passing.padded);
        // load early: the results are needed only after the second GEMM
        Beside by = beside(p, first_unit, first, last);
        passing.add(Rh, kept_R, p.R.passing.padded);
        if (sizeof(Real) == 4 && single)
            put<true>(p, tables, Wx, Rh, by, first_unit, first, last);
        else
            put<false>(p, tables, Wx, Rh, by, first_unit, first, last);
    }
}
