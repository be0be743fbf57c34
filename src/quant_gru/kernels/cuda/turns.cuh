// A tile of rows, whose codes are there, to codes of W x: groups of warps take turns to multiply by
// weights that stay in a block.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   UNIT_WARPS, GROUPS: what a block makes, see resident.cuh
//   COLUMNS     of 8 rows, of a tile
#ifndef QUANT_GRU_TURNS_CUH
#define QUANT_GRU_TURNS_CUH

#include "projected.cuh"
#include "resident.cuh"

constexpr int kRows = 8 * COLUMNS;  // of a tile
typedef Resident<UNIT_WARPS, GROUPS, PLANES * COLUMNS, 4> Tile;

// The rows of a block; tiles of as many rows go to groups in turn.
struct Span {
    int start, last, tile;
};

// Adds a tile's product: as many pairs of columns of each plane as have rows.
template <int kPairs>
inline void product(Tile::Sums &sums, uint32_t a_at, uint32_t b_at, int depth, int line_bytes,
                    int rows) {
    if constexpr (kPairs > 1)
        if (rows <= 16 * (kPairs - 1)) {
            product<kPairs - 1>(sums, a_at, b_at, depth, line_bytes, rows);
            return;
        }
    const int gates = Tile::kUnits * line_bytes;
#pragma unroll 4
    for (int k = 0; k < depth; k += 32) {
        uint32_t a[3][4], b[PLANES * kPairs][4];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) load_matrices(a[gate], a_at + k + gate * gates);
#pragma unroll
        for (int i = 0; i < PLANES * kPairs; ++i)
            load_matrices(b[i], b_at + k + (i / kPairs * kRows + i % kPairs * 16) * line_bytes);
#pragma unroll
        for (int i = 0; i < PLANES * kPairs * 6; ++i) {
            const int pair = i / 6,
                      column = pair / kPairs * COLUMNS + pair % kPairs * 2 + i / 3 % 2;
            mma<false, false>(sums[i % 3][column], a[i % 3], b[pair][i / 3 % 2 * 2],
                              b[pair][i / 3 % 2 * 2 + 1]);
        }
    }
}

// Barriers of a group by itself, and of its turn to multiply, with the group before it.
inline int alone(int group) { return 1 + group; }
inline int turn(int group) { return 1 + GROUPS + group; }

// Codes of a tile stand in planes of kRows lines from `codes` on, weights as Tile::keep has them.
inline void make_tile(const Projected &p, unsigned char *weights, uint32_t codes, const Span &span,
                      int now, int first_unit, bool exact) {
    const int own = Tile::group(), line_bytes = Tile::stride(p.padded);
    Channels channels;
    find_channels(p, first_unit + (int)pinned(Tile::unit(0)), channels);
    Tile::Sums sums;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
        int bias = 0;
#if PLANES == 1
        bias = p.folded_bytes[channels[i / 2][i % 2]];
#endif
#pragma unroll
        for (int column = 0; column < PLANES * COLUMNS; ++column)
            sums[i / 2][column][i % 2 * 2] = sums[i / 2][column][i % 2 * 2 + 1] = bias;
    }
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % UNIT_WARPS;
    const uint32_t a_at =
        shared_address(weights) + (warp * 16 + lane % 16) * line_bytes + lane / 16 * 16;
    const uint32_t b_at = codes + (lane / 16 * 8 + lane % 8) * line_bytes + lane / 8 % 2 * 16;
    const int end = now + span.tile < span.last ? now + span.tile : span.last;
    // Groups multiply one after the other: all at once, they would also quantize and round all at
    // once, and one part of a multiprocessor would always wait for another.
    if (GROUPS > 1 && now > span.start) sync_threads(turn(own), 2 * Tile::kGroupThreads);
    product<COLUMNS / 2>(sums, a_at, b_at, line_bytes - 16, line_bytes, end - now);
    if (GROUPS > 1 && end < span.last)
        arrive_threads(turn((own + 1) % GROUPS), 2 * Tile::kGroupThreads);

    // what the end takes is worked out here: through the products there are no registers for it
    const int group = (int)pinned(first_unit + Tile::unit(0)) / 16;
    if (group >= p.groups) return;
    const int flat = now + (int)pinned(Tile::row(0, 0));
    find_channels(p, first_unit + (int)pinned(Tile::unit(0)), channels);
    const auto sum = [&](int plane, int gate, int column, int i) {
        return sums[gate][plane * COLUMNS + column][i];
    };
#if PLANES == 1
    if (exact) {
        const auto total = [&](int gate, int column, int i) { return sum(0, gate, column, i); };
        float m[3][2];
#pragma unroll
        for (int i = 0; i < 6; ++i) m[i / 2][i % 2] = p.m_float[channels[i / 2][i % 2]];
        finish<float, true>(p, flat, end, group, total, m);
        return;
    }
#endif
    finish_any<true>(p, flat, end, group, channels, sum);
}

#endif
