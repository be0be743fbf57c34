// The product of two int8 matrices, summed in int32 on tensor cores: codes as bytes times weights.
#include "projection/mma_tiled.cuh"

#ifndef PTX_ON_HOST
#define QG_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#endif

typedef Multiplier<2, 2, 2, 4> Tile;

struct Product {
    const int8_t *rows;     // row i is at (i / chunk * stride + i % chunk) * padded
    const int8_t *weights;  // (3 * third, padded)
    int32_t *product;       // (count, columns)
    int64_t count, chunk, stride, padded;
    int64_t columns, third;  // third >= columns / 3
};

// A block computes 32 rows by 32 columns of each third of the weights.
extern "C" __global__ void __launch_bounds__(Tile::kThreads)
    byte_product(const __grid_constant__ Product p) {
    QG_SHARED(memory);
    const int64_t blocks = (p.third + Tile::kUnits - 1) / Tile::kUnits;
    const int64_t first_unit = blockIdx.x % blocks * Tile::kUnits;
    const int64_t first_row = blockIdx.x / blocks * Tile::kRows;
    const auto row_of = [&p, first_row](int i) -> const int8_t * {
        const int64_t row = first_row + i;
        if (row >= p.count) return nullptr;
        return p.rows + (row / p.chunk * p.stride + row % p.chunk) * p.padded;
    };
    Tile::Sums sums;
#pragma unroll
    for (int i = 0; i < 24; ++i) sums[i / 8][i / 4 % 2][i % 4] = 0;
    Tile::add<false>(sums, memory, p.weights, p.third, first_unit, p.padded, row_of);
#pragma unroll
    for (int i = 0; i < 24; ++i) {
        const int gate = i / 8, column = i / 4 % 2;
        const int64_t unit = first_unit + Tile::unit(i % 4);
        const int64_t row = first_row + Tile::row(column, i % 4);
        const int64_t channel = gate * p.third + unit;
        if (unit < p.third && channel < p.columns && row < p.count)
            p.product[row * p.columns + channel] = sums[gate][column][i % 4];
    }
}
