// The input projection from codes of x with 8-bit weights, in one kernel. It computes codes of W x
// minus the smallest code. It writes them in the order in which the recurrent kernel reads them.
//
//   PLANES      bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   CODES, POWERS, LONG: see epilogue.cuh
//   UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES: the block's tile, see mma_tiled.cuh
#include "projection/epilogue.cuh"
#include "projection/mma_tiled.cuh"

typedef Multiplier<UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES> Tile;

struct Numbers {
    const int8_t *bytes;  // (PLANES, T * N, padded)
    Projected to;
};

// A block computes a tile of units and rows. Blocks with consecutive indices have the same rows.
extern "C" __global__ void __launch_bounds__(Tile::kThreads)
    project_bytes(const __grid_constant__ Numbers numbers) {
    let_next_start();
    QG_SHARED(memory);
    const Projected &p = numbers.to;
    const int8_t *const bytes = numbers.bytes;
    const int unit_blocks = (int)((p.groups * 16 + Tile::kUnits - 1) / Tile::kUnits);
    const int64_t first_unit = (int64_t)(blockIdx.x % unit_blocks) * Tile::kUnits;
    const int64_t first_row = (int64_t)(blockIdx.x / unit_blocks) * Tile::kRows;
    const int64_t H = p.H, padded_N = p.tiles * p.NB;
    const int count = (int)(p.T * padded_N);
    const auto rows_of = [&](int64_t plane) {
        return [&p, bytes, first_row, padded_N, count, plane](int i) -> const int8_t * {
            const int64_t flat = first_row + i;
            if (flat >= count) return nullptr;
            const int t = (int)((uint32_t)flat / (uint32_t)padded_N);
            const int n = (int)(flat - t * padded_N);
            const int64_t row = (plane * p.T + t) * p.N + n;
            return n < p.N ? bytes + row * p.padded : nullptr;
        };
    };
    const int flat = (int)first_row + Tile::row(0, 0);
    const int group = (int)(first_unit + Tile::unit(0)) / 16;
    Channels channels;
    find_channels(p, (int)first_unit + Tile::unit(0), channels);

    Tile::Sums sums[PLANES];
    const auto sum = [&](int plane, int gate, int column, int i) {
        return sums[plane][gate][column][i];
    };
    float m[3][2];
    const bool exact = ends_exact(p), apart = rows_apart(p);
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        const int channel = channels[i / 2][i % 2];
        const int first = first_of(p.folded_bytes[channel], exact);
        m[i / 2][i % 2] = p.m_float[channel];
#pragma unroll
        for (int column = 0; column < PLANES * COLUMNS; ++column) {
            int (&to)[4] = sums[column / COLUMNS][i / 2][column % COLUMNS];
            to[i % 2 * 2] = to[i % 2 * 2 + 1] = column / COLUMNS == PLANES - 1 ? first : 0;
        }
    }
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
        Tile::add<false>(sums[plane], memory, p.weights, H, first_unit, p.padded, rows_of(plane),
                         apart);
    if (group >= p.groups) return;
    if (exact)
        finish_exact(p, flat, count, group, sum, m);
    else
        finish_any(p, flat, count, group, channels, sum);
}
