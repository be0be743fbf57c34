// The input projection of many rows, for codes of x and weights in bytes: weights stay in blocks,
// rows pass, and the end of a group's rows is worked on while others multiply.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   CODES, POWERS, LONG: see epilogue.cuh
//   UNIT_WARPS, GROUPS, COLUMNS, STAGES: what a block makes, see mma_weight_stationary.cuh
//   BLOCKS      of a multiprocessor, that registers have to do for
#include "projection/epilogue.cuh"
#include "projection/mma_weight_stationary.cuh"

typedef Passing<UNIT_WARPS, GROUPS, COLUMNS, STAGES, PLANES> Tile;

struct Numbers {
    const int8_t *bytes;  // (PLANES, T * N, padded)
    Projected to;
    int64_t share;  // rows of a group, a multiple of 8
    // (stretches of T): rows that are there, each as often as there are groups of units; or null
    uint32_t *counts;
    int64_t stretch;  // rows of a stretch of time, a multiple of a tile's
};

// A block: some units, and some rows for each of its groups. Blocks of the same rows follow each
// other. N is a multiple of NB: rows stand as they are counted. Where somebody waits for them, all
// groups go through time together, tile by tile.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, BLOCKS)
    project_passing(const __grid_constant__ Numbers numbers) {
    QG_SHARED(memory);
    const Projected &p = numbers.to;
    const int rows = (int)(p.T * p.N), H = (int)p.H;
    const int across = ((int)p.groups + UNIT_WARPS - 1) / UNIT_WARPS;
    const int first_unit = (int)blockIdx.x % across * Tile::kUnits;
    const bool together = numbers.counts != nullptr;
    const int strips = (int)gridDim.x / across;
    const int64_t share = together ? Tile::kTileRows : numbers.share;
    const int64_t start = ((int64_t)blockIdx.x / across * GROUPS + Tile::group()) * share;
    const int from = (int)(start < rows ? start : rows);
    const int last = (int)(together || start + share > rows ? rows : start + share);
    const int step = together ? strips * GROUPS * Tile::kTileRows : Tile::kTileRows;

    unsigned char *const kept = memory + GROUPS * Tile::kRingBytes;
    Tile::keep(kept, p.weights, H, first_unit, p.padded);
    copies_commit();
    // weights are on their way; rows come from the launch ahead
    await_launches();
    let_next_start();
    Tile::Way way(memory, numbers.bytes, rows * p.padded, p.padded, from, step, last);
    copies_wait<STAGES - 1>();
    __syncthreads();

    const bool exact = ends_exact(p), apart = rows_apart(p);
    Channels channels;
    for (int first = from; first < last; first += step) {
        Tile::Sums sums;
        find_channels(p, first_unit + (int)pinned(Tile::unit(0)), channels);
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const int bias = first_of(p.folded_bytes[channels[i / 2][i % 2]], exact);
#pragma unroll
            for (int column = 0; column < Tile::kAll; ++column)
                sums[i / 2][column][i % 2 * 2] = sums[i / 2][column][i % 2 * 2 + 1] =
                    column / COLUMNS == PLANES - 1 ? bias : 0;
        }
        way.add(sums, kept, last - first, apart);
        // what the end takes is worked out here: through the products there are no registers for it
        const int group = (int)pinned(first_unit + Tile::unit(0)) / 16;
        if (group >= p.groups) continue;
        const int flat = first + (int)pinned(Tile::row(0, 0));
        find_channels(p, first_unit + (int)pinned(Tile::unit(0)), channels);
        const auto sum = [&](int plane, int gate, int column, int i) {
            return sums[gate][plane * COLUMNS + column][i];
        };
        if (exact) {
            float m[3][2];
#pragma unroll
            for (int i = 0; i < 6; ++i) m[i / 2][i % 2] = p.m_float[channels[i / 2][i % 2]];
            finish_exact(p, flat, last, group, sum, m);
        } else {
            finish_any(p, flat, last, group, channels, sum);
        }
        if (together) {
            __syncwarp();
            const int left = last - first;
            if (threadIdx.x % 32 == 0)
                add_released(numbers.counts + first / (int)numbers.stretch,
                             left < Tile::kTileRows ? left : Tile::kTileRows);
        }
    }
}
