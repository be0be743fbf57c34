// The input projection of weights of bytes from real values of x, in one kernel: a block quantizes
// some rows, keeps their codes in shared memory, and lets units pass.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES: the block's tile, see standing.cuh
//   BLOCKS      of a multiprocessor, that registers have to do for
#include "reals.cuh"
#include "standing.cuh"

typedef Standing<UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES, PLANES> Tile;

// All rows of the block; `from` has where they start, -1 for zeros.
template <bool kFours>
inline void quantize_rows(const Reals &p, unsigned char *rows, const int64_t *from,
                          uint32_t *seen) {
    constexpr int kAhead = COLUMNS >= 8 ? 16 : 8;  // where sums have many registers, loads do
    const int C = (int)p.C, chunks = (C + 3) / 4, padded = (int)p.to.padded;
    const int plane = Tile::plane_bytes(padded);
    const int rows_on = Tile::kThreads / chunks, chunks_on = Tile::kThreads % chunks;
    int row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks;
    while (row < Tile::kRows) {
        uint32_t bits[kAhead][4];
        int rows_of[kAhead], chunks_of[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            rows_of[j] = row;
            chunks_of[j] = chunk;
            load_four<kFours>(p, row < Tile::kRows ? from[row] : -1, 4 * chunk, bits[j]);
            row += rows_on;
            chunk += chunks_on;
            if (chunk >= chunks) {
                chunk -= chunks;
                ++row;
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (rows_of[j] >= Tile::kRows) break;
            uint32_t words[PLANES];
            if (four_codes(p, bits[j], words)) seen[rows_of[j]] = 1;
            unsigned char *const to = rows + Tile::row_at(rows_of[j], 4 * chunks_of[j], padded);
            *(uint32_t *)to = words[0];
            if (PLANES == 2) *(uint32_t *)(to + plane) = words[PLANES - 1];
        }
    }
}

// A block: some rows, and a part of the units.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, BLOCKS)
    project_reals(const __grid_constant__ Reals reals) {
    let_next_start();
    QG_SHARED(memory);
    const Projected &p = reals.to;
    const int parts = (int)reals.parts, part = (int)blockIdx.x % parts;
    const int first_row = (int)blockIdx.x / parts * Tile::kRows;
    const int tiles = ((int)p.groups + UNIT_WARPS - 1) / UNIT_WARPS;
    const int first_tile = part * tiles / parts, last_tile = (part + 1) * tiles / parts;
    const int padded_N = (int)(p.tiles * p.NB), count = (int)p.T * padded_N;
    Tile::Passing passing(memory, p.weights, p.H, p.padded, first_tile * Tile::kUnits,
                          last_tile - first_tile);

    unsigned char *const rows = memory + Tile::kRingBytes;
    int64_t *const from = (int64_t *)(rows + Tile::rows_bytes((int)p.padded));
    uint32_t *const seen = (uint32_t *)(from + Tile::kRows);
#if PLANES == 1
    // of all units of the part, gate by gate
    const int units = (last_tile - first_tile) * Tile::kUnits;
    int *const folded = (int *)(seen + Tile::kRows);
    float *const m = (float *)(folded + 3 * units);
    for (int i = (int)threadIdx.x; i < units; i += Tile::kThreads) {
        const int unit = first_tile * Tile::kUnits + i;
        const bool there = unit < p.H;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            folded[gate * units + i] = there ? p.folded_bytes[gate * p.H + unit] : 0;
            m[gate * units + i] = there ? p.m_float[gate * p.H + unit] : 0.f;
        }
    }
#endif
    for (int i = (int)threadIdx.x; i < Tile::kRows; i += Tile::kThreads) {
        const int flat = first_row + i, t = flat / padded_N, n = flat - t * padded_N;
        const bool there = flat < count && n < p.N;
        from[i] = there ? t * reals.step + n * reals.next : -1;
        seen[i] = 0;
    }
    __syncthreads();
    if (reals.fours)
        quantize_rows<true>(reals, rows, from, seen);
    else
        quantize_rows<false>(reals, rows, from, seen);
    __syncthreads();
    if (part == 0)
        for (int i = (int)threadIdx.x; i < Tile::kRows; i += Tile::kThreads) {
            const int flat = first_row + i, t = flat / padded_N, n = flat - t * padded_N;
            if (from[i] >= 0) reals.nan[n * reals.nan_stride + t] = seen[i] != 0;
        }

#if PLANES == 1
    const bool exact = *p.exact_float != 0;
#endif
    for (int tile = first_tile; tile < last_tile; ++tile) {
        const int first_unit = tile * Tile::kUnits, group = (first_unit + Tile::unit(0)) / 16;
        Tile::Sums sums;
#if PLANES == 1
        const int at = (tile - first_tile) * Tile::kUnits + Tile::unit(0);
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const int of_gate = folded[i / 2 * units + at + i % 2 * 8];
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
                sums[0][i / 2][column][i % 2 * 2] = sums[0][i / 2][column][i % 2 * 2 + 1] = of_gate;
        }
#else
#pragma unroll
        for (int i = 0; i < PLANES * 12 * COLUMNS; ++i)
            sums[i / (12 * COLUMNS)][i / (4 * COLUMNS) % 3][i / 4 % COLUMNS][i % 4] = 0;
#endif
        passing.add(sums, rows);
        if (group >= p.groups) continue;
        // where results go is worked out here: through the products there are no registers for it
        const int flat = first_row + (int)pinned(Tile::row(0, 0));
        const auto sum = [&](int plane, int gate, int column, int i) {
            return sums[plane][gate][column][i];
        };
#if PLANES == 1
        if (exact) {
            const auto total = [&](int gate, int column, int i) { return sum(0, gate, column, i); };
            float factors[3][2];
#pragma unroll
            for (int i = 0; i < 6; ++i) factors[i / 2][i % 2] = m[i / 2 * units + at + i % 2 * 8];
            finish<float>(p, flat, count, group, total, factors);
            continue;
        }
#endif
        Channels channels;
        find_channels(p, first_unit + Tile::unit(0), channels);
        finish_any(p, flat, count, group, channels, sum);
    }
}
