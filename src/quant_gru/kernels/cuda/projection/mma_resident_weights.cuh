// Weight-stationary int8 GEMMs on tensor cores. Weights stay in shared memory while blocks stream
// rows of activations: two GEMMs with the same units, one after the other for each tile of rows.
//
//   typedef Resident<unit warps, groups, columns, stages> Tile;
//   Tile::keep(kept, weights, H, first_unit, padded);  // for each GEMM; then a barrier
//   Tile::Passing passing(shared, x, h, first, last);  // rows of this thread's group of warps
//   passing.add(sums, kept, padded);                   // for each GEMM in turn, tile by tile
//
// A block has `groups` groups of `unit warps` warps. Each group processes rows of its own with the
// 16 * unit warps units of the block, and does not wait for other groups. Loads run ahead across
// the end of a GEMM and of a tile, so that they overlap with the work on sums.
//
// sums[gate][column][i] of a thread belongs to unit `Tile::unit(i)` of the block and row
// `Tile::row(column, i)` of the tile, as in mma_tiled.cuh.
#ifndef QUANT_GRU_RESIDENT_CUH
#define QUANT_GRU_RESIDENT_CUH

#include "projection/mma_tiled.cuh"

// Rows of a GEMM's activations, `padded` bytes each. `padded` and addresses are multiples of 16.
struct PassingRows {
    const int8_t *rows;
    int64_t padded;
};

template <int kUnitWarps, int kGroups, int kColumns, int kStages>
struct Resident {
    static constexpr int kGroupThreads = 32 * kUnitWarps, kThreads = kGroupThreads * kGroups;
    static constexpr int kUnits = 16 * kUnitWarps, kRows = 8 * kColumns;
    static constexpr int kDepth = 64;  // bytes of a row per stage
    static constexpr int kStageBytes = kRows * kDepth, kRingBytes = kStages * kStageBytes;
    // loads of 16 bytes per thread and stage
    static constexpr int kLoads = kRows * 4 / kGroupThreads;
    typedef int Sums[3][kColumns][4];

    static_assert(kColumns % 2 == 0, "columns are loaded two at a time");
    static_assert(kLoads == 0 || kRows * 4 % kGroupThreads == 0, "threads load alike");
    static_assert(kGroupThreads % 32 == 0, "lines that a thread loads stand alike");

    static inline int group() { return (int)threadIdx.x / kGroupThreads; }
    static inline int unit(int i) {
        return (int)threadIdx.x / 32 % kUnitWarps * 16 + i / 2 * 8 + (int)threadIdx.x % 32 / 4;
    }
    static inline int row(int column, int i) {
        return column * 8 + (int)threadIdx.x % 4 * 2 + i % 2;
    }

    // The stride of lines of weights. 8 lines that are read at once lie in different banks.
    static inline int stride(int64_t padded) { return ((int)padded + 31) / 32 * 32 + 16; }
    static inline int kept_bytes(int64_t padded) { return 3 * kUnits * stride(padded); }

    // Start to copy the weights of the block's units. `weights` are (3H, padded).
    static inline void keep(unsigned char *to, const int8_t *weights, int64_t H, int64_t first_unit,
                            int64_t padded) {
        const uint32_t memory = shared_address(to);
        const int chunks = (int)padded / 16, line_bytes = stride(padded);
        const int warp = (int)threadIdx.x / 32;
        for (int line = warp; line < 3 * kUnits; line += kThreads / 32) {
            const int64_t at = first_unit + line % kUnits;
            const bool there = at < H;
            const int8_t *const from = weights + (line / kUnits * H + (there ? at : 0)) * padded;
            for (int chunk = (int)threadIdx.x % 32; chunk < chunks; chunk += 32)
                copy_async(memory + line * line_bytes + chunk * 16, from + chunk * 16, there);
        }
    }

    static inline uint32_t place(int line, int chunk) {
        return line * kDepth + ((chunk ^ (line >> 1 & 3)) << 4);
    }

    // Streams a group's rows, from `first` to before `last`.
    struct Passing {
        const PassingRows &x, &h;
        uint32_t ring, read_slot, write_slot;
        const int8_t *from;   // source of this thread's next load
        int row, left, last;  // row of the next load, and bytes of the row from there
        bool second;          // the next load belongs to the second GEMM

        inline Passing(unsigned char *shared, const PassingRows &x, const PassingRows &h, int first,
                       int last)
            : x(x), h(h), read_slot(0), write_slot(0), last(last), second(false) {
            ring = shared_address(shared) + group() * kRingBytes;
            row = first + line();
            start();
#pragma unroll
            for (int i = 0; i < kStages - 1; ++i) load();
        }

        static inline int line() { return (int)threadIdx.x % kGroupThreads / 4; }
        static inline int chunk() { return (int)threadIdx.x % 4; }

        inline void start() {
            const PassingRows &now = second ? h : x;
            from = now.rows + row * now.padded + chunk() * 16;
            left = (int)now.padded - chunk() * 16;
        }

        // Load the next stage, if there is one. Beyond the last row `from` is not a valid address,
        // and nothing is read.
        inline void load() {
            constexpr int kLines = kGroupThreads / 4;
            if (row - line() < last) {
                const int64_t padded = kLoads == 1 ? 0 : second ? h.padded : x.padded;
                const uint32_t to = ring + write_slot + place(line(), chunk());
#pragma unroll
                for (int j = 0; j < kLoads; ++j)
                    copy_async(to + j * kLines * kDepth, from + j * kLines * padded,
                               left > 0 && row + j * kLines < last);
                from += kDepth;
                left -= kDepth;
                if (left + chunk() * 16 <= 0) {
                    if (second) row += kRows;
                    second = !second;
                    start();
                }
            }
            copies_commit();
            write_slot = write_slot == (kStages - 1) * kStageBytes ? 0 : write_slot + kStageBytes;
        }

        // Add the product of a tile's rows, `padded` bytes each, and the weights of the next GEMM.
        inline void add(Sums &sums, unsigned char *kept, int64_t padded) {
            const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % kUnitWarps;
            const int bytes = (int)padded, line_bytes = stride(bytes);
            const uint32_t a_at =
                shared_address(kept) + (warp * 16 + lane % 16) * line_bytes + lane / 16 * 16;
            const uint32_t b_at = ring + place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
            for (int k = 0; k < bytes; k += kDepth) {
                copies_wait<kStages - 2>();
                sync_threads(1 + group(), kGroupThreads);
                load();
#pragma unroll
                for (int j = 0; j < kDepth; j += 32) {
                    if (j && k + j >= bytes) break;
                    multiply_gates<false>(sums, a_at + k + j, kUnits * line_bytes,
                                          (b_at ^ j) + read_slot, 16 * kDepth);
                }
                read_slot = read_slot == (kStages - 1) * kStageBytes ? 0 : read_slot + kStageBytes;
            }
        }
    };
};

#endif
