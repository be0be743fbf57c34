// Products of bytes on tensor cores with rows of activations that stay in shared memory while
// weights pass: the three gates of a block's units, tile by tile.
//
//   typedef Standing<unit warps, row warps, columns, stages, planes> Tile;
//   Tile::Passing passing(ring, weights, H, padded, first_unit, tiles);  // loads begin
//   ...                                                                  // rows are written
//   passing.add(sums, rows);                                             // tile by tile
//
// A block has Tile::kRows rows of codes in one or two planes, from `rows` on as `Tile::row_at` has
// them, and goes through tiles of Tile::kUnits units. Loads of weights run ahead over the end of a
// tile. `weights` are int8 (3H, padded), channel = gate * H + unit; padded is a multiple of 16, and
// so are addresses. Units beyond H are zeros, and so are features of weights beyond `padded`.
//
// sums[plane][gate][column][i] of a thread belongs to unit `Tile::unit(i)` of the tile and row
// `Tile::row(column, i)` of the block, as in multiply.cuh.
#ifndef QUANT_GRU_STANDING_CUH
#define QUANT_GRU_STANDING_CUH

#include "ptx.cuh"

template <int kUnitWarps, int kRowWarps, int kColumns, int kStages, int kPlanes>
struct Standing {
    static constexpr int kThreads = 32 * kUnitWarps * kRowWarps;
    static constexpr int kUnits = 16 * kUnitWarps, kRows = 8 * kColumns * kRowWarps;
    static constexpr int kPairs = (kColumns + 1) / 2;  // columns are loaded two at a time
    static constexpr int kLinesOfRows = kRows + kColumns % 2 * 8;
    static constexpr int kDepth = 64;  // bytes of a line in a stage
    static constexpr int kLines = 3 * kUnits, kStageBytes = kLines * kDepth;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kAhead = kStages - 1;
    static constexpr int kLoads = (kLines * 4 + kThreads - 1) / kThreads;  // 16 bytes each
    typedef int Sums[kPlanes][3][kColumns][4];

    static_assert(kThreads % 32 == 0, "lines that a thread loads stand alike");

    static inline int unit(int i) {
        return (int)threadIdx.x / 32 % kUnitWarps * 16 + i / 2 * 8 + (int)threadIdx.x % 32 / 4;
    }
    static inline int row(int column, int i) {
        return ((int)threadIdx.x / 32 / kUnitWarps * kColumns + column) * 8 +
               (int)threadIdx.x % 4 * 2 + i % 2;
    }

    // From one row to the next: 8 rows that are read at once stand in different banks.
    static inline int stride(int padded) { return (padded + 31) / 32 * 32 + 16; }
    static inline int plane_bytes(int padded) { return kLinesOfRows * stride(padded); }
    // Where four codes of a row stand, from a multiple of 4 on.
    static inline int row_at(int row, int feature, int padded) {
        return row * stride(padded) + feature;
    }
    static inline int rows_bytes(int padded) { return kPlanes * plane_bytes(padded); }

    static inline uint32_t place(int line, int chunk) {
        return line * kDepth + ((chunk ^ (line >> 1 & 3)) << 4);
    }

    struct Passing {
        const int8_t *weights;
        uint32_t ring, read_slot, write_slot;
        int H, bytes, from[kLoads];  // lines of this thread's loads, in bytes from the first unit's
        int unit, k, left;           // of the next stage: first unit, features, tiles
        static inline int line() { return (int)threadIdx.x / 4; }
        static inline int chunk() { return (int)threadIdx.x % 4; }

        inline Passing(unsigned char *shared, const int8_t *weights, int64_t H, int64_t padded,
                       int first_unit, int tiles)
            : weights(weights),
              read_slot(0),
              write_slot(0),
              H((int)H),
              bytes((int)padded),
              unit(first_unit),
              k(0),
              left(tiles) {
            ring = shared_address(shared);
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const int at = line() + j * (kThreads / 4);
                from[j] = (at / kUnits * this->H + at % kUnits) * bytes + chunk() * 16;
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) load();
        }

        inline void load() {
            if (left > 0) {
                const int8_t *const first = weights + (int64_t)unit * bytes + k;
                const uint32_t to = ring + write_slot + place(line(), chunk());
                const bool inside = k + chunk() * 16 < bytes;
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    const int at = line() + j * (kThreads / 4);
                    if (kLines * 4 % kThreads && at >= kLines) break;
                    const bool there = inside && unit + at % kUnits < H;
                    copy_async(to + j * (kThreads / 4) * kDepth, there ? first + from[j] : weights,
                               there);
                }
                k += kDepth;
                if (k >= bytes) {
                    k = 0;
                    unit += kUnits;
                    --left;
                }
            }
            copies_commit();
            write_slot = write_slot == (kStages - 1) * kStageBytes ? 0 : write_slot + kStageBytes;
        }

        inline void next_stage() {
            copies_wait<kAhead - 1>();
            __syncthreads();
            load();
        }

        // Adds the products of the next tile.
        inline void add(Sums &sums, unsigned char *rows) {
            const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
            const int line_bytes = stride(bytes), plane = plane_bytes(bytes);
            const uint32_t a_at = ring + place(warp % kUnitWarps * 16 + lane % 16, lane / 16);
            uint32_t b_at =
                shared_address(rows) + lane / 8 % 2 * 16 +
                (warp / kUnitWarps * kColumns * 8 + lane / 16 * 8 + lane % 8) * line_bytes;
            for (int at = 0; at < bytes; at += kDepth) {
                next_stage();
#pragma unroll
                for (int j = 0; j < kDepth; j += 32) {
                    if (j && at + j >= bytes) break;
                    multiply(sums, (a_at ^ j) + read_slot, b_at + j, line_bytes * 16, plane);
                }
                b_at += kDepth;
                read_slot = read_slot == (kStages - 1) * kStageBytes ? 0 : read_slot + kStageBytes;
            }
        }

        // Adds 32 features.
        static inline void multiply(Sums &sums, uint32_t units, uint32_t rows, int next_pair,
                                    int next_plane) {
            uint32_t a[3][4];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                load_matrices(a[gate], units + gate * kUnits * kDepth);
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane)
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair) {
                    uint32_t b[4];
                    load_matrices(b, rows + plane * next_plane + pair * next_pair);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (2 * pair + i >= kColumns) break;
#pragma unroll
                        for (int gate = 0; gate < 3; ++gate)
                            mma<false, false>(sums[plane][gate][2 * pair + i], a[gate], b[2 * i],
                                              b[2 * i + 1]);
                    }
                }
        }
    };
};

#endif
