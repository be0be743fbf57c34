// The slopes of every element and step where all weights and activations are bytes: both products
// are made here, and their sums go through the gates while they are in registers.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, QG_ZONEOUT, TZ, TR, TG: as for the recurrence
//   UNIT_WARPS  units of a block over 16
//   GROUPS      groups of warps of a block, with rows of their own
//   HALF, DIRS  as elsewhere
#include "element.cuh"
#include "resident.cuh"

typedef Resident<UNIT_WARPS, GROUPS, 4, 4> Tile;

struct Product {
    const int8_t *weights;    // (3H, padded)
    const Channel *channels;  // (3H)
    PassingRows passing;      // (rows, padded): bytes of x, or of the state before
    double lo, hi;            // limits of the result less its zero point
    float low, high;          // the same with the magic number added
};

struct Numbers {
    Product W, R;
    const int64_t *lengths;  // (N) or null
    const uint8_t *held;     // (T * N, H) or null
    Slopes *of_R, *of_W;     // (T * N, H): of the state before and R h; of W x
    int64_t N, H, rows;
    int64_t share;   // rows of a group, a multiple of 8
    int64_t h_less;  // from bytes of states to zero-point-free codes
    Gates gates;
};
struct Pair {
    Numbers d[DIRS];
};

// A channel, from its sums to zero-point-free codes; kSingle: float holds all there is.
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

// A tile's slopes: units from `first_unit` on, rows from `first` to before `last`.
template <bool kSingle>
inline void put(const Numbers &p, const Readers &tables, Tile::Sums &Wx, Tile::Sums &Rh,
                int first_unit, int first, int last) {
    const int H = (int)p.H;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const int unit = first_unit + Tile::unit(2 * half);
        if (unit < H) {
            Column<kSingle> of_Wx[3], of_Rh[3];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                of_Wx[gate].open(p.W.channels[gate * H + unit]);
                of_Rh[gate].open(p.R.channels[gate * H + unit]);
            }
            int h[Tile::kRows / 8][2];
#pragma unroll
            for (int i = 0; i < Tile::kRows / 4; ++i) {
                const int row = first + Tile::row(i / 2, i % 2);
                h[i / 2][i % 2] =
                    row < last ? p.R.passing.rows[row * p.R.passing.padded + unit] : 0;
            }
#pragma unroll
            for (int i = 0; i < Tile::kRows / 4; ++i) {
                const int column = i / 2, row = first + Tile::row(column, i % 2);
                if (row >= last) continue;
                const int64_t at = (int64_t)row * H + unit;
                bool stays = false;
                if (p.lengths) {
                    const int t = row / (int)p.N;
                    stays = t >= p.lengths[row - t * (int)p.N];
                }
                if (p.held) stays = stays || p.held[at];
                ElementSlopes found = slopes_of_staying();
                if (!stays) {
                    Watched by_x[3], by_h[3];
#pragma unroll
                    for (int gate = 0; gate < 3; ++gate) {
                        by_x[gate] = of_Wx[gate](p.W, Wx[gate][column][i % 2]);
                        by_h[gate] = of_Rh[gate](p.R, Rh[gate][column][i % 2]);
                    }
                    found = slopes_of_element(p.gates, tables.z, tables.r, tables.g, by_x, by_h,
                                              (Real)(h[column][i % 2] + (int)p.h_less),
                                              p.held != nullptr);
                }
                p.of_R[at] = found.of_R;
                p.of_W[at] = found.of_W;
            }
        }
        // the other half, without another copy of the code
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int i = 0; i < Tile::kRows / 4; ++i) {
                Wx[gate][i / 2][i % 2] = Wx[gate][i / 2][i % 2 + 2];
                Rh[gate][i / 2][i % 2] = Rh[gate][i / 2][i % 2 + 2];
            }
    }
}

// A block: some units, and some rows for each of its groups. Blocks of the same rows follow each
// other.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, 384 / Tile::kThreads)
    slopes_bytes(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y];
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
        passing.add(Wx, kept_W, 0);
        passing.add(Rh, kept_R, 1);
        if (sizeof(Real) == 4 && single)
            put<true>(p, tables, Wx, Rh, first_unit, first, last);
        else
            put<false>(p, tables, Wx, Rh, first_unit, first, last);
    }
}
