// The input projection from real values of x with 8-bit weights, in one kernel. A block quantizes
// some rows, keeps their codes in shared memory, and streams the weights. Two warpgroups multiply
// in turn (ping-pong).
//
//   PLANES      bytes per code of x: 1, or 2 with x = 256 * first + second + 128
//   CODES, POWERS, LONG, STRIP: see epilogue.cuh
//   EXACT, WHOLE: see quantize.cuh
//   SHORT, FOURS: see quantize_rows.cuh
//   COLUMNS     columns of 8 rows per block. Each plane has lines of its own. If PLANES * COLUMNS
//   is
//     odd, the GEMM computes one more column.
//   STAGES, STEPS: see wgmma_pingpong.cuh
#include "projection/quantize_rows.cuh"
#include "projection/wgmma_pingpong.cuh"

typedef Warpgroup<PLANES * COLUMNS, STAGES, STEPS> Tile;

constexpr int kRows = 8 * COLUMNS, kOwn = COLUMNS;  // rows per block, rows per warp

// The line of one of 8 rows if a thread's rows are four apart, see `row_of_eight`.
inline int line_of_row(int row) { return row % 4 * 2 + row / 4; }

// A block projects some rows to a part of the tiles of units.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1)
    project_groups(const __grid_constant__ Reals reals) {
    let_next_start();
    QG_SHARED(memory);
    const Projected &p = reals.to;
    // `parts` is a power of two, since a division would delay the loads of rows
    const int parts = (int)reals.parts, log_parts = 31 - __clz(parts);
    const int part = (int)blockIdx.x & (parts - 1);
    const int first_row = ((int)blockIdx.x >> log_parts) * kRows;
    const int tiles = ((int)p.groups + 3) / 4;
    const int first_tile = part * tiles >> log_parts, last_tile = (part + 1) * tiles >> log_parts;
    const int count = (int)(p.T * p.tiles * p.NB);

    unsigned char *const rows = memory + 2 * Tile::kRingBytes;
    unsigned char *const barriers = rows + Tile::kPanels * Tile::kPanelBytes;
    int64_t *const from = (int64_t *)(barriers + Tile::kBarrierBytes);
    uint32_t *const seen = (uint32_t *)(from + kRows);
    Tile::Passing passing(memory, barriers, p.weights, first_tile, last_tile);
    // a warp quantizes every eighth row
    const int warp = (int)threadIdx.x / 32;
    const Taken<kOwn> taken(reals, first_row + warp + 8 * ((int)threadIdx.x % 32), count,
                            from + warp * kOwn, seen + warp * kOwn);
    Taken<kOwn>::All<Tile::kPanels> values;
    values.load(taken);
    // for all units of the part, by gate
    const int units = (last_tile - first_tile) * Tile::kUnits;
    int *const folded = (int *)(seen + kRows);
    float *const m = (float *)(folded + 3 * units);
    for (int i = (int)threadIdx.x; i < 3 * units; i += Tile::kThreads) {
        const int gate = (i >= units) + (i >= 2 * units);
        const int unit = first_tile * Tile::kUnits + i - gate * units;
        const int channel = gate * (int)p.H + (unit < (int)p.H ? unit : 0);
        copy_async<4>(folded + i, p.folded_bytes + channel);
        copy_async<4>(m + i, p.m_float + channel);
    }
    copies_commit();
    const int group = Tile::group();
    const int line = rows_apart(p) ? line_of_row(warp) : warp;
    const auto place = [&](int row, int feature) {
        return rows + Tile::place(line, feature) + row * (8 * Tile::kDepth);
    };
    values.quantize(taken, place, kRows * Tile::kDepth);
    if (part == 0) taken.flag();

    // kernels with `finish_held` nearly always use it; otherwise they use `finish_any`
    const bool held = kMayHold && ends_held(p), exact = !kMayHold && ends_exact(p);
    copies_wait<0>();
    shown_to_copies();
    __syncthreads();
    // the second warpgroup may have one tile less
    const int rounds = (last_tile - first_tile + 1) / 2;
    for (int round = 0; round < rounds; ++round) {
        const int tile = first_tile + 2 * round + group;
        const bool there = tile < last_tile;
        const auto before = [&] {
            if (group || round) sync_threads(3 + group, Tile::kThreads);
        };
        const auto behind = [&] {
            if (!group || round + 1 < rounds) arrive_threads(4 - group, Tile::kThreads);
        };
        if (!there) {
            before();
            behind();
            continue;
        }
        Tile::Sums sums;
        const int at = (tile - first_tile) * Tile::kUnits + Tile::unit(0);
        passing.multiply(sums, rows, before, behind);
        const int unit = tile * Tile::kUnits + Tile::unit(0);
        if (unit / 16 >= (int)p.groups) continue;
        // compute the results' addresses here: no registers are free for them during the GEMM
        const int flat = first_row + (int)pinned(Tile::line(0, 0));
        int biases[3][2];
#pragma unroll
        for (int i = 0; i < 6; ++i) biases[i / 2][i % 2] = folded[i / 2 * units + at + i % 2 * 8];
        const auto sum = [&](int plane, int gate, int column, int i) {
            return sums[gate][plane * COLUMNS + column][i];
        };
        float factors[3][2];
#pragma unroll
        for (int i = 0; i < 6; ++i) factors[i / 2][i % 2] = m[i / 2 * units + at + i % 2 * 8];
        if (held) {
            finish_held(p, flat, count, unit / 16, sum, factors, biases);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 6; ++i) biases[i / 2][i % 2] = first_of(biases[i / 2][i % 2], exact);
        const auto begun = [&](int plane, int gate, int column, int i) {
            const int bias = plane == PLANES - 1 ? biases[gate][i / 2] : 0;
            return (int)((uint32_t)sum(plane, gate, column, i) + (uint32_t)bias);
        };
        if (exact) {
            finish_exact(p, flat, count, unit / 16, begun, factors);
            continue;
        }
        Channels channels;
        find_channels(p, unit, channels);
        finish_any(p, flat, count, unit / 16, channels, begun);
    }
}
