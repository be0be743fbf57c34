// The input projection of weights of bytes from real values of x, for many rows: weights stay in
// blocks, and rows pass, whose codes the blocks of a cluster make and share.
//
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//   CL          blocks of a cluster, each with other units
//   UNIT_WARPS, GROUPS, COLUMNS: what a block makes, see turns.cuh
#include "reals.cuh"
#include "sharing.cuh"
#include "turns.cuh"

typedef Sharing<Tile::kGroupThreads, kRows> Shared;

struct Numbers {
    Reals reals;
    int64_t span, tile;  // rows of a cluster and of a tile, a multiple of 16
};

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

    const bool exact = PLANES == 1 && *p.exact_float != 0;
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
        make_tile(p, memory, codes, {start, last, tile}, now, first_unit, exact);
    }
}
