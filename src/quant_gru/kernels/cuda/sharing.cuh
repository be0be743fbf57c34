// Rows of codes that the blocks of a cluster share: each makes those of some rows of a tile from
// real values, and sends them to the others.
//
//   CL          blocks of the cluster, two or more
//   PLANES      bytes of a code of x: x, or 256 * first + second + 128
//
//   Sharing<threads, rows> sharing(...);  // of a group of threads, the same in all blocks
//   sharing.take(first, slot, barrier);   // this block's rows of the tile that begins there
//   sharing.give(first, slot, flags);     // after a barrier of the group
//   sharing.wait(slot, phase);            // until those of other blocks are there
//
// A tile stands in one of kSlots slots, in planes of `rows` lines. It is given after the one before
// it has been waited for: whoever gave that one had done with the one two before it, so that the
// slot is free.
#ifndef QUANT_GRU_SHARING_CUH
#define QUANT_GRU_SHARING_CUH

#include "reals.cuh"

constexpr int kSlots = 3;

template <int kThreads, int kRows>
struct Sharing {
    const Reals &p;
    unsigned char *const slots;
    uint64_t *const full;   // of each slot
    int64_t *const starts;  // of this block's rows of a tile, in values, or -1
    uint8_t *const seen;    // of each slot and row: whether it is NaN
    const int line_bytes, depth, part, rank, last;
    const int thread;

    // From one row to the next: 8 rows that are read at once stand in different banks.
    static inline int stride(int padded) { return (padded + 31) / 32 * 32 + 16; }
    static inline int plane_bytes(int padded) { return kRows * stride(padded); }
    static inline int slot_bytes(int padded) { return PLANES * plane_bytes(padded); }
    // Beside the slots, without barriers.
    static constexpr int kBeside = kRows * 8 + kSlots * kRows;

    // `tile` rows of each tile, a multiple of CL; `last`: where rows end.
    inline Sharing(const Reals &p, unsigned char *slots, uint64_t *full, unsigned char *beside,
                   int tile, int rank, int last, int thread)
        : p(p),
          slots(slots),
          full(full),
          starts((int64_t *)beside),
          seen(beside + kRows * 8),
          line_bytes(stride((int)p.to.padded)),
          depth(line_bytes - 16),
          part(tile / CL),
          rank(rank),
          last(last),
          thread(thread) {
        for (int i = thread; i < kSlots * kRows; i += kThreads) seen[i] = 0;
    }

    inline unsigned char *lines(int slot) const {
        return slots + slot * PLANES * kRows * line_bytes;
    }

    template <bool kFours>
    inline void take_rows(int slot) const {
        constexpr int kAhead = kFours ? 8 : 2;  // loads of a thread at once
        const int C = (int)p.C, padded = (int)p.to.padded, chunks = depth / 4;
        const int rows_on = kThreads / chunks, chunks_on = kThreads % chunks;
        unsigned char *const to = lines(slot) + rank * part * line_bytes;
        int row = thread / chunks, chunk = thread % chunks;
        while (row < part) {
            uint32_t bits[kAhead][4];
            int at[kAhead];  // a row, and a feature
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                at[j] = row << 16 | 4 * chunk;
                const int64_t start = row < part && 4 * chunk < C ? starts[row] : -1;
                load_four<kFours>(p, start, 4 * chunk, bits[j]);
                row += rows_on;
                chunk += chunks_on;
                if (chunk >= chunks) {
                    chunk -= chunks;
                    ++row;
                }
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                const int of = at[j] >> 16, feature = at[j] & 65535;
                if (of >= part) break;
                uint32_t words[PLANES];
                if (four_codes(p, bits[j], words)) seen[slot * kRows + of] = 1;
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane)
                    *(uint32_t *)(to + (plane * kRows + of) * line_bytes + feature) =
                        feature < padded ? words[plane] : 0;
            }
        }
    }

    // A step and a row of the batch; their number counts padding.
    inline bool find(int flat, int &t, int &n) const {
        const uint32_t N = (uint32_t)(p.to.tiles * p.to.NB);
        t = (int)((uint32_t)flat / N);
        n = flat - t * (int)N;
        return flat < last && n < (int)p.to.N;
    }

    inline void take(int first, int slot, int barrier) const {
        int t, n;
        for (int i = thread; i < part; i += kThreads)
            starts[i] = find(first + rank * part + i, t, n) ? t * p.step + n * p.next : -1;
        sync_threads(barrier, kThreads);
        if (p.fours)
            take_rows<true>(slot);
        else
            take_rows<false>(slot);
    }

    // What is NaN is written where asked for.
    inline void give(int first, int slot, bool flags) const {
        int t, n;
        for (int i = thread; i < part && flags; i += kThreads)
            if (find(first + rank * part + i, t, n)) {
                p.nan[n * p.nan_stride + t] = seen[slot * kRows + i];
                seen[slot * kRows + i] = 0;
            }
        const int chunks = depth / 16, from = rank * part;
        for (int i = thread; i < PLANES * part * chunks; i += kThreads) {
            const int line = i / chunks, plane = PLANES == 1 ? 0 : line / part;
            unsigned char *const at =
                lines(slot) + (plane * (kRows - part) + from + line) * line_bytes + i % chunks * 16;
            const uint4 v = *(const uint4 *)at;
#pragma unroll
            for (int peer = 1; peer < CL; ++peer) send(at, full + slot, (rank + peer) % CL, v);
        }
    }

    inline void wait(int slot, uint32_t phase) const {
        if (thread == 0) barrier_expect(full + slot, (CL - 1) * PLANES * part * depth);
        barrier_wait(full + slot, phase);
    }
};

#endif
