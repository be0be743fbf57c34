// Products of bytes by groups of four warps (`wgmma`) with lines of activations that stay in shared
// memory while weights pass: the three gates of a group's 64 units, tile by tile. Of two groups one
// multiplies while the other works on its sums.
//
//   typedef Warpgroup<columns, stages, steps> Tile;
//   Tile::Passing passing(rings, barriers, weights, first, last);  // loads begin
//   ...                                                            // lines are written
//   passing.multiply(sums, lines, before, behind);                 // tile by tile
//
// A block has two groups and Tile::kLines lines of codes, from `lines` on as `Tile::place` has
// them; writers call `shown_to_copies`, and all threads wait for each other before the first
// product. There are 1024 bytes or more behind the last line. A group goes through every second
// tile of 64 units, from `first` to before `last`. Weights are int8 [tile][128 features][gate][64
// units][128], bytes of a line as `place` turns them, with zeros where there are no units or
// features; there are 32 features or less for each of the steps. Each group has a ring of stages of
// 128 features of a tile; `rings` and `lines` are multiples of 1024, and there are
// Tile::kBarrierBytes at `barriers`, a multiple of 8.
//
// sums[gate][column][i] of a thread belongs to unit `Tile::unit(i)` of the tile and line
// `Tile::line(column, i)` of the block, as in mma_tiled.cuh.
#ifndef QUANT_GRU_WARPGROUP_CUH
#define QUANT_GRU_WARPGROUP_CUH

#include "kernel_runtime/cuda/ptx.cuh"

template <int kColumns, int kStages, int kSteps>
struct Warpgroup {
    static_assert((kSteps + 3) / 4 <= kStages, "weights of a tile are there at once");
    static constexpr int kGroupThreads = 128, kThreads = 2 * kGroupThreads;
    static constexpr int kUnits = 64, kLines = 8 * kColumns, kDepth = 128;
    // of products, where columns come in pairs: the last one may be of no use
    static constexpr int kPaired = (kColumns + 1) / 2 * 2;
    static constexpr int kPanels = (kSteps + 3) / 4;  // of 128 features, as stages have
    static constexpr int kPanelBytes = kLines * kDepth, kGateBytes = kUnits * kDepth;
    static constexpr int kStageBytes = 3 * kGateBytes, kRingBytes = kStages * kStageBytes;
    static constexpr int kBarrierBytes = 2 * kStages * 8;
    typedef int Sums[3][kPaired][4];

    static inline int group() { return (int)threadIdx.x / kGroupThreads; }
    static inline int unit(int i) {
        return (int)threadIdx.x % kGroupThreads / 32 * 16 + i / 2 * 8 + (int)threadIdx.x % 32 / 4;
    }
    static inline int line(int column, int i) {
        return column * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
    }
    // Where codes of a line stand, from a multiple of 4 on.
    static inline int place(int line, int feature) {
        return feature / kDepth * kPanelBytes + line * kDepth + ((feature / 16 ^ line) % 8 << 4) +
               feature % 16;
    }

    struct Passing {
        const int8_t *from;  // the next stage
        uint32_t ring;
        uint64_t *there;  // of each stage
        int tiles;        // that loads have not reached the end of
        int panel, slot, write_slot;
        uint32_t parity;

        inline Passing(unsigned char *rings, unsigned char *barriers, const int8_t *weights,
                       int first, int last)
            : from(weights + (int64_t)(first + group()) * (kPanels * kStageBytes)),
              ring(shared_address(rings) + group() * kRingBytes),
              there((uint64_t *)barriers + group() * kStages),
              tiles((last - first - group() + 1) / 2),
              panel(0),
              slot(0),
              write_slot(0),
              parity(0) {
            if (loads()) {
#pragma unroll 1
                for (int i = 0; i < kStages; ++i) barrier_init(there + i);
                shown_to_copies();
            }
            begin(kStages);
        }

        // One thread of a group loads; all keep count of it.
        static inline bool loads() { return threadIdx.x % kGroupThreads == 0; }
        static inline int after(int slot) { return slot == kStages - 1 ? 0 : slot + 1; }

        inline void begin(int stages) {
#pragma unroll 1
            for (int i = 0; i < stages && tiles > 0; ++i) {
                if (loads()) {
                    barrier_expect(there + write_slot, kStageBytes);
                    copy_bulk(ring + write_slot * kStageBytes, from, kStageBytes,
                              there + write_slot);
                }
                write_slot = after(write_slot);
                from += kStageBytes;
                if (++panel == kPanels) {
                    // the other group has the next tile
                    panel = 0;
                    --tiles;
                    from += kPanels * kStageBytes;
                }
            }
        }

        // Sums are worked out before what follows: nothing touches them while products go on.
        static inline void settle(Sums &sums) {
#pragma unroll
            for (int i = 0; i < 12 * kPaired; ++i)
                settled(sums[i / (4 * kPaired)][i / 4 % kPaired][i % 4]);
        }

        // The product of the next tile. `before` is called when all operands are there, and
        // `behind` when the tensor cores have them to do.
        template <class Before, class Behind>
        inline void multiply(Sums &sums, unsigned char *lines, const Before &before,
                             const Behind &behind) {
            uint64_t a[kPanels];
#pragma unroll
            for (int i = 0; i < kPanels; ++i) {
                await_copies(there + slot, parity);
                a[i] = matrix_in_lines(ring + slot * kStageBytes);
                slot = after(slot);
                if (slot == 0) parity ^= 1;
            }
            const uint64_t b = matrix_in_lines(shared_address(lines));
            settle(sums);
            // sums may be settled while the other group multiplies
            products_begin();
            before();
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int gate = 0; gate < 3; ++gate)
                    GroupProduct<kPaired>::add(
                        sums[gate], matrix_from(a[step / 4], gate * kGateBytes + step % 4 * 32),
                        matrix_from(b, step / 4 * kPanelBytes + step % 4 * 32), step > 0);
            products_commit();
            behind();
            products_wait();
            settle(sums);
            if (tiles > 0) {
                // all warps have read what is overwritten
                sync_threads(1 + group(), kGroupThreads);
                begin(kPanels);
            }
        }
    };
};

#endif
