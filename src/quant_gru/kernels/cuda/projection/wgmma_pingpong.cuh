// Activation-stationary int8 GEMM with warpgroup instructions (`wgmma`). Lines of activations stay
// in shared memory while weights of the three gates stream through it, in tiles of 64 units. Two
// warpgroups work in ping-pong: one multiplies while the other processes its sums.
//
//   typedef Warpgroup<columns, stages, steps> Tile;
//   Tile::Passing passing(rings, barriers, weights, first, last);  // starts loads
//   ...                                                            // write lines
//   passing.multiply(sums, lines, before, behind);                 // once per tile
//
// A block has two warpgroups and Tile::kLines lines of codes, stored from `lines` as `Tile::place`
// defines. Writers call `shown_to_copies`, and all threads synchronize before the first product. At
// least 1024 bytes follow the last line. A warpgroup processes every second tile, from `first` to
// before `last`. Weights are int8 [tile][128 features][gate][64 units][128], and the bytes of a
// line are swizzled as by `place`. Missing units and features are zeros. There are at most 32
// features per step. Each warpgroup has a ring of stages, and a stage has 128 features of a tile.
// `rings` and `lines` are aligned to 1024. `barriers` has Tile::kBarrierBytes bytes and is aligned
// to 8.
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
    // columns of the GEMM, which needs pairs of columns: the last one may be unused
    static constexpr int kPaired = (kColumns + 1) / 2 * 2;
    static constexpr int kPanels = (kSteps + 3) / 4;  // panels of 128 features, as in a stage
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
    // The offset of four codes of a line; `feature` is a multiple of 4.
    static inline int place(int line, int feature) {
        return feature / kDepth * kPanelBytes + line * kDepth + ((feature / 16 ^ line) % 8 << 4) +
               feature % 16;
    }

    struct Passing {
        const int8_t *from;  // source of the next stage
        uint32_t ring;
        uint64_t *there;  // barriers of the stages
        int tiles;        // tiles that are not fully requested
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

        // One thread of a warpgroup loads; all threads track the state of loads.
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
                    // the other warpgroup has the next tile
                    panel = 0;
                    --tiles;
                    from += kPanels * kStageBytes;
                }
            }
        }

        // A compiler barrier for the sums: no instruction may access them during asynchronous
        // products.
        static inline void settle(Sums &sums) {
#pragma unroll
            for (int i = 0; i < 12 * kPaired; ++i)
                settled(sums[i / (4 * kPaired)][i / 4 % kPaired][i % 4]);
        }

        // Multiply the next tile. `before` is called when all operands have arrived, and `behind`
        // when all products have been issued to the tensor cores.
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
            // `settle` comes before `before`, so it can run while the other warpgroup multiplies
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
                // all warps have finished reading the stages that are overwritten
                sync_threads(1 + group(), kGroupThreads);
                begin(kPanels);
            }
        }
    };
};

#endif
