// The weight-stationary input projection of many rows, from codes of x as bytes and 8-bit weights.
// Blocks keep their weights and stream rows. The epilogue of a group of warps overlaps with the
// GEMM of other groups.
//
//   PLANES      bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   CODES, POWERS, LONG: see epilogue.cuh
//   UNIT_WARPS, GROUPS, COLUMNS, STAGES: the block's shape, see mma_weight_stationary.cuh
//   BLOCKS      blocks per multiprocessor for which registers must suffice
#include "projection/epilogue.cuh"
#include "projection/mma_weight_stationary.cuh"

typedef Passing<UNIT_WARPS, GROUPS, COLUMNS, STAGES, PLANES> Tile;

struct Numbers {
    const int8_t *bytes;  // (PLANES, T * N, padded)
    Projected to;
    int64_t share;  // rows of a group, a multiple of 8
    // (time chunks,): finished rows, each counted once per group of 16 units; or null
    uint32_t *counts;
    int64_t stretch;  // rows of a time chunk, a multiple of a tile's rows
};

// A block computes some units, and each of its groups some rows. Blocks with consecutive indices
// have the same rows. N is a multiple of NB, so rows need no padding. If a recurrence waits for the
// results (`counts`), all groups advance through time together, tile by tile.
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
    // weights load before the preceding launch ends; that launch writes the rows
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
        // compute the epilogue's operands here: no registers are free for them during the GEMM
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
