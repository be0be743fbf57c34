// Products of bytes by groups of four warps (`wgmma`) with lines of activations that stay in shared
// memory while weights pass: the three gates of a group's 64 units, tile by tile. Of two groups one
// multiplies while the other works on its sums.
//
//   typedef Warpgroup<columns, stages, steps, stays> Tile;
//   Tile::Passing passing(rings, weights, H, padded, first, last);  // loads begin
//   ...                                                             // lines are written
//   passing.multiply(sums, lines, before, behind);                  // tile by tile
//
// A block has two groups and Tile::kLines lines of codes, from `lines` on as `Tile::place` has
// them; writers call `shown_to_copies` before the barrier. A group goes through every second tile
// of 64 units, from unit `first` to before `last`. A stage has 128 features of a tile's weights,
// which are int8 (3H, padded), channel = gate * H + unit; padded is a multiple of 16, and there are
// 32 features or less for each of the steps. Each group has a ring of stages; `rings` and `lines`
// are multiples of 1024. Units beyond H are zeros, and so are features of weights beyond `padded`.
// Where a group's weights all stay, it has a stage for each, and they are waited for with the
// lines.
//
// sums[gate][column][i] of a thread belongs to unit `Tile::unit(i)` of the tile and line
// `Tile::line(column, i)` of the block, as in multiply.cuh.
#ifndef QUANT_GRU_WARPGROUP_CUH
#define QUANT_GRU_WARPGROUP_CUH

#include "ptx.cuh"

template <int kColumns, int kStages, int kSteps, bool kStays>
struct Warpgroup {
    static_assert((kSteps + 3) / 4 <= kStages, "weights of a tile are there at once");
    static constexpr int kGroupThreads = 128, kThreads = 2 * kGroupThreads;
    static constexpr int kUnits = 64, kLines = 8 * kColumns, kDepth = 128;
    static constexpr int kPanels = (kSteps + 3) / 4;  // of 128 features, as stages have
    static constexpr int kPanelBytes = kLines * kDepth, kGateBytes = kUnits * kDepth;
    static constexpr int kStageBytes = 3 * kGateBytes, kRingBytes = kStages * kStageBytes;
    typedef int Sums[3][kColumns][4];

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
        const int8_t *weights;
        uint32_t ring, read_slot, write_slot;
        int H, padded;
        int unit, k, last;  // of the next stage: first unit, features; units after the last tile

        inline Passing(unsigned char *rings, const int8_t *weights, int64_t H, int64_t padded,
                       int first_unit, int last_unit)
            : weights(weights),
              ring(shared_address(rings) + group() * kRingBytes),
              read_slot(0),
              write_slot(0),
              H((int)H),
              padded((int)padded),
              unit(first_unit),
              k(0),
              last(last_unit) {
            begin(kStages);
        }

        inline void begin(int loads) {
#pragma unroll 1
            for (int i = 0; i < loads; ++i) load();
        }

        static inline int line() { return (int)threadIdx.x % kGroupThreads / 8; }
        static inline int chunk() { return (int)threadIdx.x % 8; }
        static inline uint32_t after(uint32_t slot) {
            return slot == (kStages - 1) * kStageBytes ? 0 : slot + kStageBytes;
        }

        inline void load() {
            if (unit < last) {
                const uint32_t to =
                    ring + write_slot + line() * kDepth + ((chunk() ^ line()) % 8 << 4);
                const int8_t *from = weights + (int64_t)(unit + line()) * padded + k + chunk() * 16;
                const int64_t gate = (int64_t)H * padded;
                const int lines = 16 * padded;
                if (unit + kUnits <= H && k + kDepth <= padded) {
#pragma unroll
                    for (int j = 0; j < 12; ++j)
                        copy_async(to + j * 16 * kDepth, from + j / 4 * gate + j % 4 * lines, true);
                } else {
                    const bool inside = k + chunk() * 16 < padded;
#pragma unroll
                    for (int j = 0; j < 12; ++j) {
                        const bool there = inside && unit + line() + j % 4 * 16 < H;
                        copy_async(to + j * 16 * kDepth,
                                   there ? from + j / 4 * gate + j % 4 * lines : weights, there);
                    }
                }
                k += kDepth;
                if (k >= padded) {
                    k = 0;
                    unit += 2 * kUnits;
                }
            }
            copies_commit();
            write_slot = after(write_slot);
        }

        // Sums are worked out before what follows: nothing touches them while products go on.
        static inline void settle(Sums &sums) {
#pragma unroll
            for (int i = 0; i < 12 * kColumns; ++i)
                settled(sums[i / (4 * kColumns)][i / 4 % kColumns][i % 4]);
        }

        // The product of the next tile. `before` is called when all operands are there, and
        // `behind` when the tensor cores have them to do.
        template <class Before, class Behind>
        inline void multiply(Sums &sums, unsigned char *lines, const Before &before,
                             const Behind &behind) {
            if (!kStays) {
                copies_wait<kStages - kPanels>();
                shown_to_copies();
                sync_threads(1 + group(), kGroupThreads);
            }
            uint64_t a[kPanels];
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                a[panel] = matrix_in_lines(ring + read_slot);
                read_slot = after(read_slot);
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
                    GroupProduct<kColumns>::add(
                        sums[gate], matrix_from(a[step / 4], gate * kGateBytes + step % 4 * 32),
                        matrix_from(b, step / 4 * kPanelBytes + step % 4 * 32), step > 0);
            products_commit();
            behind();
            products_wait();
            settle(sums);
            if (!kStays) {
                sync_threads(1 + group(), kGroupThreads);
                begin(kPanels);
            }
        }
    };
};

#endif
