// Activation-stationary int8 GEMM on tensor cores. Rows of activations stay in shared memory while
// the block streams the weights of its units' three gates, tile by tile.
//
//   typedef Standing<unit warps, row warps, columns, stages, planes, depth, registers> Tile;
//   Tile::Passing passing(ring, weights, H, padded, first_unit, tiles);  // starts loads
//   ...                                                                  // write rows
//   passing.add(sums, rows, start, apart);                               // once per tile
//
// A block has Tile::kRows rows of codes in one or two planes, stored from `rows` as `Tile::row_at`
// defines, and iterates over tiles of Tile::kUnits units. A stage has `depth` features (64 or 128)
// of a tile's weights. `registers` is the number of registers per thread. Loads of weights run
// ahead across the end of a tile. `weights` are int8 (3H, padded), channel = gate * H + unit.
// `padded` and addresses are multiples of 16. Units beyond H and features of weights beyond
// `padded` are zeros.
//
// sums[plane][gate][column][i] of a thread belongs to unit `Tile::unit(i)` of the tile and row
// `Tile::row(column, i)` of the block. `apart` changes rows as in mma_tiled.cuh.
#ifndef QUANT_GRU_STANDING_CUH
#define QUANT_GRU_STANDING_CUH

#include "kernel_runtime/cuda/ptx.cuh"

template <int kUnitWarps, int kRowWarps, int kColumns, int kStages, int kPlanes, int kDepth,
          int kRegisters>
struct Standing {
    static constexpr int kThreads = 32 * kUnitWarps * kRowWarps;
    static constexpr int kUnits = 16 * kUnitWarps, kRows = 8 * kColumns * kRowWarps;
    static constexpr int kPairs = (kColumns + 1) / 2;  // columns are loaded in pairs
    static constexpr int kLinesOfRows = kRows + kColumns % 2 * 8;
    static constexpr int kLines = 3 * kUnits, kStageBytes = kLines * kDepth;
    static constexpr int kRingBytes = kStages * kStageBytes;
    static constexpr int kAhead = kStages - 1;
    static constexpr int kChunks = kDepth / 16;              // chunks of 16 bytes per line
    static constexpr int kLinesOfLoad = kThreads / kChunks;  // lines per load of all threads
    static constexpr int kLoads = (kLines + kLinesOfLoad - 1) / kLinesOfLoad;
    // whether operands are double-buffered: registers for sums, both operand sets, and 40 others
    static constexpr bool kTwice =
        12 * kPlanes * kColumns + 8 * (3 + kPlanes * kPairs) + 40 <= kRegisters;
    typedef int Sums[kPlanes][3][kColumns][4];

    static_assert(kDepth == 64 || kDepth == 128, "`place` keeps banks apart");
    static_assert(kLinesOfLoad % 8 == 0, "lines that a thread loads stand alike");

    static inline int unit(int i) {
        return (int)threadIdx.x / 32 % kUnitWarps * 16 + i / 2 * 8 + (int)threadIdx.x % 32 / 4;
    }
    static inline int row(int column, int i) {
        return ((int)threadIdx.x / 32 / kUnitWarps * kColumns + column) * 8 +
               (int)threadIdx.x % 4 * 2 + i % 2;
    }

    // The stride of rows. 8 rows that are read at once lie in different banks.
    static inline int stride(int padded) { return (padded + 31) / 32 * 32 + 16; }
    static inline int plane_bytes(int padded) { return kLinesOfRows * stride(padded); }
    // The offset of four codes of a row; `feature` is a multiple of 4.
    static inline int row_at(int row, int feature, int padded) {
        return row * stride(padded) + feature;
    }
    static inline int rows_bytes(int padded) { return kPlanes * plane_bytes(padded); }

    static inline uint32_t place(int line, int chunk) {
        return line * kDepth + ((chunk ^ (kDepth == 64 ? line >> 1 & 3 : line & 7)) << 4);
    }

    struct Passing {
        const int8_t *weights, *next;  // all weights; this thread's first chunk of the next stage
        uint32_t ring, read_slot, write_slot;
        int H, bytes, on[kLoads];  // byte offsets of this thread's lines from its first line
        int unit, k, left;         // the next stage's first unit and feature; tiles left to load
        static inline int line() { return (int)threadIdx.x / kChunks; }
        static inline int chunk() { return (int)threadIdx.x % kChunks; }

        inline Passing(unsigned char *shared, const int8_t *weights, int64_t H, int64_t padded,
                       int first_unit, int tiles)
            : weights(weights),
              ring(shared_address(shared)),
              read_slot(0),
              write_slot(0),
              H((int)H),
              bytes((int)padded),
              unit(first_unit),
              k(0),
              left(tiles) {
            const int first = (line() / kUnits * this->H + line() % kUnits) * bytes;
            next = weights + (int64_t)first_unit * bytes + first + chunk() * 16;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const int at = line() + j * kLinesOfLoad;
                on[j] = (at / kUnits * this->H + at % kUnits) * bytes - first;
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) load();
        }

        inline void load() {
            if (left > 0) {
                const uint32_t to = ring + write_slot + place(line(), chunk());
                const bool all_units = unit + kUnits <= H;
                if (all_units && k + kDepth <= bytes) {
#pragma unroll
                    for (int j = 0; j < kLoads; ++j) {
                        if (kLines % kLinesOfLoad && line() + j * kLinesOfLoad >= kLines) break;
                        copy_async(to + j * kLinesOfLoad * kDepth, next + on[j], true);
                    }
                } else {
                    const bool inside = k + chunk() * 16 < bytes;
#pragma unroll
                    for (int j = 0; j < kLoads; ++j) {
                        const int at = line() + j * kLinesOfLoad;
                        if (kLines % kLinesOfLoad && at >= kLines) break;
                        const bool there = inside && (all_units || unit + at % kUnits < H);
                        copy_async(to + j * kLinesOfLoad * kDepth, there ? next + on[j] : weights,
                                   there);
                    }
                }
                next += kDepth;
                k += kDepth;
                if (k >= bytes) {
                    next += kUnits * bytes - k;
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

        // Set `sums` to the products of the next tile. In the last plane, start[gate][i] is added
        // to element i of every column.
        inline void add(Sums &sums, unsigned char *rows, const int (&start)[3][4], bool apart) {
            const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
            const uint32_t a_at = ring + place(warp % kUnitWarps * 16 + lane % 16, lane / 16);
            uint32_t b_at =
                shared_address(rows) + lane / 8 % 2 * 16 +
                (warp / kUnitWarps * kColumns * 8 + lane / 16 * 8 + row_of_eight(lane % 8, apart)) *
                    stride(bytes);
            stage<true>(sums, start, a_at, b_at, bytes);
            for (int left_k = bytes - kDepth; left_k > 0; left_k -= kDepth) {
                b_at += kDepth;
                stage<false>(sums, start, a_at, b_at, left_k);
            }
        }

        // Multiply the next stage, of which at most `features` features remain.
        template <bool kStart>
        inline void stage(Sums &sums, const int (&start)[3][4], uint32_t a_at, uint32_t b_at,
                          int features) {
            const int pair = stride(bytes) * 16, plane = plane_bytes(bytes);
            Operands operands[2];
            next_stage();
            a_at += read_slot;
            if (kTwice) operands[0].load(a_at, b_at, pair, plane);
#pragma unroll
            for (int j = 0; j < kDepth; j += 32) {
                const bool more = j + 32 < kDepth && j + 32 < features;
                Operands &of = operands[j / 32 % 2];
                if (kTwice) {
                    if (more)
                        operands[(j / 32 + 1) % 2].load(a_at ^ j + 32, b_at + j + 32, pair, plane);
                } else {
                    of.load_units(a_at ^ j);
                }
                of.template multiply<kStart>(sums, start, b_at + j, pair, plane, j == 0);
                if (!more) break;
            }
            read_slot = read_slot == (kStages - 1) * kStageBytes ? 0 : read_slot + kStageBytes;
        }
    };

    // Operands of 32 features. If registers cannot hold all rows, a pair of columns is loaded while
    // the previous pair is multiplied.
    struct Operands {
        static constexpr int kOfRows = kPlanes * kPairs;
        uint32_t a[3][4], b[kTwice ? kOfRows : 2][4];

        inline void load_units(uint32_t units) {
#pragma unroll
            for (int gate = 0; gate < 3; ++gate)
                load_matrices(a[gate], units + gate * kUnits * kDepth);
        }
        inline void load_rows(int i, uint32_t rows, int next_pair, int next_plane) {
            load_matrices(b[kTwice ? i : i % 2],
                          rows + i / kPairs * next_plane + i % kPairs * next_pair);
        }
        inline void load(uint32_t units, uint32_t rows, int next_pair, int next_plane) {
            load_units(units);
#pragma unroll
            for (int i = 0; i < kOfRows; ++i) load_rows(i, rows, next_pair, next_plane);
        }

        template <bool kStart>
        inline void multiply(Sums &sums, const int (&start)[3][4], uint32_t rows, int next_pair,
                             int next_plane, bool first) {
            constexpr int kZeros[4] = {};
            if (!kTwice) load_rows(0, rows, next_pair, next_plane);
#pragma unroll
            for (int at = 0; at < kOfRows; ++at) {
                if (!kTwice && at + 1 < kOfRows) load_rows(at + 1, rows, next_pair, next_plane);
                const uint32_t (&of)[4] = b[kTwice ? at : at % 2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = at % kPairs * 2 + i;
                    if (column >= kColumns) break;
#pragma unroll
                    for (int gate = 0; gate < 3; ++gate) {
                        int (&sum)[4] = sums[at / kPairs][gate][column];
                        if (kStart && first)
                            mma_from(sum, a[gate], of[2 * i], of[2 * i + 1],
                                     at / kPairs == kPlanes - 1 ? start[gate] : kZeros);
                        else
                            mma<false, false>(sum, a[gate], of[2 * i], of[2 * i + 1]);
                    }
                }
            }
        }
    };
};

#endif
