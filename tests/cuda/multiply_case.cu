// The product of bytes by itself: sums of a block, twice over in one kernel.
#include "projection/mma_tiled.cuh"

#ifndef QG_SHARED
#define QG_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

struct Numbers {
    const int8_t *weights;      // (3H, padded)
    const unsigned char *rows;  // (rows, padded)
    int32_t *signed_sums;       // (rows, 3H)
    int32_t *unsigned_sums;     // (rows, 3H), of rows as unsigned bytes
    int64_t H, padded, count;
};

extern "C" __global__ void __launch_bounds__(32 * UNIT_WARPS * ROW_WARPS)
    multiply_case(const __grid_constant__ Numbers p) {
    typedef Multiplier<UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES> Tile;
    QG_SHARED(memory);
    const int64_t first_row = (int64_t)blockIdx.x * Tile::kRows;
    const int64_t first_unit = (int64_t)blockIdx.y * Tile::kUnits;
    const auto row_of = [&](int i) {
        const int64_t row = first_row + i;
        return row < p.count ? p.rows + row * p.padded : nullptr;
    };
    Tile::Sums sums[2];
#pragma unroll
    for (int set = 0; set < 2; ++set)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[set][gate][column][i] = set;
    Tile::add<false>(sums[0], memory, p.weights, p.H, first_unit, p.padded, row_of);
    Tile::add<true>(sums[1], memory, p.weights, p.H, first_unit, p.padded, row_of);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int64_t unit = first_unit + Tile::unit(i);
                const int64_t row = first_row + Tile::row(column, i);
                if (unit >= p.H || row >= p.count) continue;
                const int64_t at = row * 3 * p.H + gate * p.H + unit;
                p.signed_sums[at] = sums[0][gate][column][i];
                p.unsigned_sums[at] = sums[1][gate][column][i];
            }
}
