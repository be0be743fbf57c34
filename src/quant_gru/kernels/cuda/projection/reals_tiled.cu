// The input projection from real values of x with 8-bit weights, in one kernel. A block quantizes
// some rows, keeps their codes in shared memory, and streams the weights.
//
//   PLANES      bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   CODES, POWERS, LONG, STRIP: see epilogue.cuh
//   EXACT, WHOLE: see quantize.cuh
//   SHORT, FOURS: see quantize_rows.cuh
//   UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES, DEPTH: see mma_activation_stationary.cuh
//   BLOCKS      blocks per multiprocessor for which registers must suffice
#include "projection/mma_activation_stationary.cuh"
#include "projection/quantize_rows.cuh"

constexpr int kRegisters = 65536 / (32 * UNIT_WARPS * ROW_WARPS * BLOCKS);
typedef Standing<UNIT_WARPS, ROW_WARPS, COLUMNS, STAGES, PLANES, DEPTH, kRegisters> Tile;

constexpr int kOwn = Tile::kRows / (UNIT_WARPS * ROW_WARPS);  // rows that a warp quantizes

// A block projects some rows to a part of the units.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, BLOCKS)
    project_reals(const __grid_constant__ Reals reals) {
    let_next_start();
    QG_SHARED(memory);
    const Projected &p = reals.to;
    const int parts = (int)reals.parts, part = (int)blockIdx.x % parts;
    const int first_row = (int)blockIdx.x / parts * Tile::kRows;
    const int tiles = ((int)p.groups + UNIT_WARPS - 1) / UNIT_WARPS;
    const int first_tile = part * tiles / parts, last_tile = (part + 1) * tiles / parts;
    const int padded = (int)p.padded, count = (int)(p.T * p.tiles * p.NB);

    unsigned char *const rows = memory + Tile::kRingBytes;
    int64_t *const from = (int64_t *)(rows + Tile::rows_bytes(padded));
    uint32_t *const seen = (uint32_t *)(from + Tile::kRows);
    const int own = (int)threadIdx.x / 32 * kOwn;
    const Taken<kOwn> taken(reals, first_row + own + (int)threadIdx.x % 32, count, from + own,
                            seen + own);
    Taken<kOwn>::Values values;
    taken.load(values, {});
    // for all units of the part, by gate; `folded` is duplicated, since sums start in pairs
    const int units = (last_tile - first_tile) * Tile::kUnits;
    int *const folded = (int *)(seen + Tile::kRows);
    float *const m = (float *)(folded + 6 * units);
    for (int i = (int)threadIdx.x; i < 3 * units; i += Tile::kThreads) {
        const int gate = (i >= units) + (i >= 2 * units);
        const int unit = first_tile * Tile::kUnits + i - gate * units;
        const int channel = gate * (int)p.H + (unit < (int)p.H ? unit : 0);
        copy_async<4>(folded + 2 * i, p.folded_bytes + channel);
        copy_async<4>(folded + 2 * i + 1, p.folded_bytes + channel);
        copy_async<4>(m + i, p.m_float + channel);
    }
    Tile::Passing passing(memory, p.weights, p.H, p.padded, first_tile * Tile::kUnits,
                          last_tile - first_tile);
    unsigned char *const codes = rows + Tile::row_at(own, 0, padded);
    const int stride = Tile::stride(padded);
    taken.quantize(
        values, [&](int row, int feature) { return codes + row * stride + feature; },
        Tile::plane_bytes(padded));
    if (part == 0) taken.flag();

    const bool exact = ends_exact(p);
    copies_wait<Tile::kAhead - 1>();
    __syncthreads();
    for (int tile = first_tile; tile < last_tile; ++tile) {
        const int first_unit = tile * Tile::kUnits, group = (first_unit + Tile::unit(0)) / 16;
        Tile::Sums sums;
        int start[3][4];
        const int at = (tile - first_tile) * Tile::kUnits + Tile::unit(0);
#pragma unroll
        for (int i = 0; i < 6; ++i) {
            const uint2 two = load8(shared_address(folded + 2 * (i / 2 * units + at + i % 2 * 8)));
            start[i / 2][i % 2 * 2] = first_of((int)two.x, exact);
            start[i / 2][i % 2 * 2 + 1] = first_of((int)two.y, exact);
        }
        passing.add(sums, rows, start, rows_apart(p));
        if (group >= p.groups) continue;
        // compute the results' addresses here: no registers are free for them during the GEMM
        const int flat = first_row + (int)pinned(Tile::row(0, 0));
        const auto sum = [&](int plane, int gate, int column, int i) {
            return sums[plane][gate][column][i];
        };
        if (exact) {
            float factors[3][2];
#pragma unroll
            for (int i = 0; i < 6; ++i) factors[i / 2][i % 2] = m[i / 2 * units + at + i % 2 * 8];
            finish_exact(p, flat, count, group, sum, factors);
            continue;
        }
        Channels channels;
        find_channels(p, first_unit + Tile::unit(0), channels);
        finish_any(p, flat, count, group, channels, sum);
    }
}
