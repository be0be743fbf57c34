// The input projection of weights of bytes from real values of x, for many rows: weights stay in
// blocks, and rows pass, whose codes the blocks of a cluster make and share.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   CL          blocks of a cluster, each with other units
//   UNIT_WARPS, GROUPS: what a block makes, see resident.cuh
//   COLUMNS     of 8 rows, of a tile
#include "reals.cuh"
#include "resident.cuh"
#include "sharing.cuh"

constexpr int kRows = 8 * COLUMNS;  // of a tile
typedef Resident<UNIT_WARPS, GROUPS, PLANES * COLUMNS, 4> Tile;
typedef Sharing<Tile::kGroupThreads, kRows> Shared;

struct Numbers {
    Reals reals;
    int64_t span, tile;  // rows of a cluster and of a tile, a multiple of 16
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

extern "C" __global__ void __launch_bounds__(Tile::kThreads, 1)
    project_shared(const __grid_constant__ Numbers numbers) {
    let_next_start();
    QG_SHARED(memory);
    const Reals &reals = numbers.reals;
    const Projected &p = reals.to;
    const int rank = (int)blockIdx.x % CL, cluster = (int)blockIdx.x / CL, H = (int)p.H;
    // clusters of the same rows
    const int across = ((int)p.groups + UNIT_WARPS * CL - 1) / (UNIT_WARPS * CL);
    const int first_unit = (cluster % across * CL + rank) * Tile::kUnits;
    const int count = (int)(p.T * p.tiles * p.NB), start = cluster / across * (int)numbers.span;
    const int last = start + (int)numbers.span < count ? start + (int)numbers.span : count;
    const int tile = (int)numbers.tile, padded = (int)p.padded, own = Tile::group();

    Tile::keep(memory, p.weights, H, first_unit, padded);
    copies_commit();
    unsigned char *const slots = memory + Tile::kept_bytes(padded);
    unsigned char *const beside = slots + GROUPS * kSlots * Shared::slot_bytes(padded);
    uint64_t *const barriers = (uint64_t *)(beside + GROUPS * Shared::kBeside);
    if (threadIdx.x == 0)
        for (int i = 0; i < GROUPS * kSlots; ++i) barrier_init(barriers + i);
    const Shared shared(reals, slots + own * kSlots * Shared::slot_bytes(padded),
                        barriers + own * kSlots, beside + own * Shared::kBeside, tile, rank, last,
                        (int)threadIdx.x % Tile::kGroupThreads);
    const bool flags = cluster % across == 0;

#if PLANES == 1
    const bool exact = *p.exact_float != 0;
#endif
    const int line_bytes = Tile::stride(padded);
    Channels channels;
    int slot = kSlots - 1;
    uint32_t phase = 1;
    // a tile is made before the one ahead of it is multiplied; ahead of the first there is none
    for (int now = start + (own - GROUPS) * tile; now < last; now += GROUPS * tile) {
        const int next = now + GROUPS * tile, next_slot = slot == kSlots - 1 ? 0 : slot + 1;
        const bool none = now < start, more = next < last;
        if (more) shared.take(next, next_slot, alone(own));
        if (none) {
            copies_wait<0>();
            cluster_sync();
        } else {
            if (more) sync_threads(alone(own), Tile::kGroupThreads);
            shared.wait(slot, phase);
        }
        if (more) shared.give(next, next_slot, flags);
        const uint32_t codes = shared_address(shared.lines(slot));
        slot = next_slot;
        phase ^= slot == 0;
        if (none) continue;

        Tile::Sums sums;
        find_channels(p, first_unit + (int)pinned(Tile::unit(0)), channels);
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
            shared_address(memory) + (warp * 16 + lane % 16) * line_bytes + lane / 16 * 16;
        const uint32_t b_at = codes + (lane / 16 * 8 + lane % 8) * line_bytes + lane / 8 % 2 * 16;
        const int end = now + tile < last ? now + tile : last;
        // Groups multiply one after the other: all at once, they would also quantize and round all
        // at once, and one part of a multiprocessor would always wait for another.
        if (GROUPS > 1 && now > start) sync_threads(turn(own), 2 * Tile::kGroupThreads);
        product<COLUMNS / 2>(sums, a_at, b_at, line_bytes - 16, line_bytes, end - now);
        if (GROUPS > 1 && end < last)
            arrive_threads(turn((own + 1) % GROUPS), 2 * Tile::kGroupThreads);

        // what the end takes is worked out here: through the products there are no registers for it
        const int group = (int)pinned(first_unit + Tile::unit(0)) / 16;
        if (group >= p.groups) continue;
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
            continue;
        }
#endif
        finish_any<true>(p, flat, end, group, channels, sum);
    }
}
