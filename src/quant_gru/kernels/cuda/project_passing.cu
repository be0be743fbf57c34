// The input projection of many rows, for codes of x and weights in bytes: weights stay in blocks,
// and rows pass.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   UNIT_WARPS, GROUPS, COLUMNS: what a block makes, see turns.cuh
#include "turns.cuh"

struct Numbers {
    const int8_t *bytes;  // (PLANES, T * N, padded)
    Projected to;
    int64_t span, tile;  // rows of a block, and of a tile, a multiple of 16
};

// Starts to copy a tile; beyond the rows and beyond `padded` there are zeros.
inline void load(const Numbers &numbers, unsigned char *slot, int first, const Span &span) {
    const Projected &p = numbers.to;
    const int padded = (int)p.padded, line_bytes = Tile::stride(padded);
    const int chunks = (line_bytes - 16) / 16, lane = (int)threadIdx.x % 32;
    const uint32_t to = shared_address(slot);
    for (int line = (int)threadIdx.x / 32 % UNIT_WARPS; line < PLANES * kRows; line += UNIT_WARPS) {
        const int row = first + line % kRows;
        if (line % kRows >= span.tile) continue;
        const int8_t *const from = numbers.bytes + (line / kRows * p.T * p.N + row) * padded;
        for (int chunk = lane; chunk < chunks; chunk += 32) {
            const bool there = row < span.last && chunk * 16 < padded;
            copy_async(to + line * line_bytes + chunk * 16,
                       there ? from + chunk * 16 : numbers.bytes, there);
        }
    }
}

// A block: some units of some rows. Blocks of the same rows follow each other. N is a multiple of
// NB: rows stand as they are counted.
extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1)
    project_passing(const __grid_constant__ Numbers numbers) {
    let_next_start();
    QG_SHARED(memory);
    const Projected &p = numbers.to;
    const int across = ((int)p.groups + UNIT_WARPS - 1) / UNIT_WARPS, rows = (int)(p.T * p.N);
    const int first_unit = (int)blockIdx.x % across * Tile::kUnits, tile = (int)numbers.tile;
    const int start = (int)blockIdx.x / across * (int)numbers.span;
    const Span span = {start, start + (int)numbers.span < rows ? start + (int)numbers.span : rows,
                       tile};
    const int own = Tile::group(), slot_bytes = PLANES * kRows * Tile::stride(p.padded);
    unsigned char *slot = memory + Tile::kept_bytes(p.padded) + own * 2 * slot_bytes;

    Tile::keep(memory, p.weights, p.H, first_unit, p.padded);
    const int first = start + own * tile;
    if (first < span.last) load(numbers, slot, first, span);
    copies_commit();
    const bool exact = PLANES == 1 && *p.exact_float != 0;
    copies_wait<0>();
    __syncthreads();
    bool second = false;
    for (int now = first; now < span.last; now += GROUPS * tile) {
        copies_wait<0>();
        // of all of the group, which has done with the other slot, too
        sync_threads(alone(own), Tile::kGroupThreads);
        const uint32_t codes = shared_address(slot + second * slot_bytes);
        second = !second;
        if (now + GROUPS * tile < span.last)
            load(numbers, slot + second * slot_bytes, now + GROUPS * tile, span);
        copies_commit();
        make_tile(p, memory, codes, span, now, first_unit, exact);
    }
}
