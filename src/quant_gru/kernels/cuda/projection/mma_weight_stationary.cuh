// Weight-stationary int8 GEMM on tensor cores. Weights stay in shared memory while blocks stream
// rows of activations in one or two planes.
//
//   typedef Passing<unit warps, groups, columns, stages, planes> Tile;
//   Tile::keep(kept, weights, H, first_unit, padded);  // then a commit
//   Tile::Way way(ring, rows, plane, padded, first, step, last);  // of this thread's group
//   way.add(sums, kept, last - row, apart);  // tile by tile, after a barrier
//
// Groups of warps, their units and their rings are those of mma_resident_weights.cuh.
//
// `rows` are int8 (planes, ..., padded), with `plane` bytes from a plane to the next. `padded` and
// addresses are multiples of 16. A tile has Tile::kTileRows rows.
// sums[gate][plane * columns + column][i] belongs to row `Tile::row(column, i)` of the tile.
// `apart` changes rows as in mma_tiled.cuh.
#ifndef QUANT_GRU_PASSING_CUH
#define QUANT_GRU_PASSING_CUH

#include "projection/mma_resident_weights.cuh"

template <int kUnitWarps, int kGroups, int kColumns, int kStages, int kPlanes>
struct Passing : Resident<kUnitWarps, kGroups, kPlanes * kColumns, kStages> {
    typedef Resident<kUnitWarps, kGroups, kPlanes * kColumns, kStages> Base;
    static constexpr int kTileRows = 8 * kColumns, kAll = kPlanes * kColumns;
    static constexpr int kLines = Base::kGroupThreads / 4;  // lines per load of a group
    static constexpr int kLoads = Base::kLoads ? Base::kLoads : 1, kDepth = Base::kDepth;
    typedef typename Base::Sums Sums;

    static_assert(kColumns % 2 == 0, "pairs of columns are of one plane");

    static inline uint32_t weights_at(unsigned char *kept, int64_t padded) {
        const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32 % kUnitWarps;
        return shared_address(kept) + (warp * 16 + lane % 16) * Base::stride(padded) +
               lane / 16 * 16;
    }

    // Streams a group's tiles, `step` rows apart, from row `first` to before `last`.
    struct Way {
        uint32_t ring, read_slot, write_slot;
        const int8_t *from[kLoads];      // sources of this thread's loads of the next stage
        int padded, row, step, k, last;  // `row`, `k`: first row and feature of the next stage

        static inline int line(int j) {
            return (int)threadIdx.x % Base::kGroupThreads / 4 + j * kLines;
        }
        static inline int chunk() { return (int)threadIdx.x % 4; }

        inline Way(unsigned char *rings, const int8_t *rows, int64_t plane, int64_t padded,
                   int first, int step, int last)
            : read_slot(0),
              write_slot(0),
              padded((int)padded),
              row(first),
              step(step),
              k(0),
              last(last) {
            ring = shared_address(rings) + Base::group() * Base::kRingBytes;
#pragma unroll
            for (int j = 0; j < kLoads; ++j)
                from[j] = rows + line(j) / kTileRows * plane +
                          (first + line(j) % kTileRows) * padded + chunk() * 16;
#pragma unroll
            for (int i = 0; i < kStages - 1; ++i) load();
        }

        // Load the next stage, if there is one. Beyond the last row `from` is not a valid address,
        // and nothing is read.
        inline void load() {
            if (row < last) {
                const uint32_t to = ring + write_slot + Base::place(line(0), chunk());
                const bool inside = k + chunk() * 16 < padded;
#pragma unroll
                for (int j = 0; j < kLoads; ++j) {
                    if (Base::kLoads == 0 && line(j) >= Base::kRows) break;
                    copy_async(to + j * kLines * kDepth, from[j],
                               inside && row + line(j) % kTileRows < last);
                    from[j] += kDepth;
                }
                k += kDepth;
                if (k >= padded) {
                    const int on = step * padded - k;
#pragma unroll
                    for (int j = 0; j < kLoads; ++j) from[j] += on;
                    row += step;
                    k = 0;
                }
            }
            copies_commit();
            write_slot = write_slot == (kStages - 1) * Base::kStageBytes
                             ? 0
                             : write_slot + Base::kStageBytes;
        }

        inline void next_stage() {
            copies_wait<kStages - 2>();
            sync_threads(1 + Base::group(), Base::kGroupThreads);
            load();
        }
        inline void leave_stage() {
            read_slot =
                read_slot == (kStages - 1) * Base::kStageBytes ? 0 : read_slot + Base::kStageBytes;
        }

        // Multiply 32 features and add to `sums`. An incomplete tile skips pairs of columns without
        // rows.
        template <bool kWhole>
        static inline void multiply(Sums &sums, const uint32_t (&a)[3][4], uint32_t b_at,
                                    int rows) {
            uint32_t b[kAll / 2][4];
#pragma unroll
            for (int pair = 0; pair < kAll / 2; ++pair)
                if (kWhole || pair * 16 % kTileRows < rows)
                    load_matrices(b[pair], b_at + pair * 16 * kDepth);
#pragma unroll
            for (int pair = 0; pair < kAll / 2; ++pair) {
                if (!kWhole && pair * 16 % kTileRows >= rows) continue;
#pragma unroll
                for (int i = 0; i < 6; ++i)
                    mma<false, false>(sums[i % 3][2 * pair + i / 3], a[i % 3], b[pair][i / 3 * 2],
                                      b[pair][i / 3 * 2 + 1]);
            }
        }

        template <bool kWhole>
        inline void product(Sums &sums, unsigned char *kept, int rows, bool apart) {
            const int lane = (int)threadIdx.x % 32;
            const uint32_t b_at =
                ring + Base::place(lane / 16 * 8 + row_of_eight(lane % 8, apart), lane / 8 % 2);
            const uint32_t a_at = weights_at(kept, padded);
            const int gates = Base::kUnits * Base::stride(padded);
            for (int k = 0; k < padded; k += kDepth) {
                next_stage();
#pragma unroll
                for (int j = 0; j < kDepth; j += 32) {
                    if (j && k + j >= padded) break;
                    uint32_t a[3][4];
#pragma unroll
                    for (int gate = 0; gate < 3; ++gate)
                        load_matrices(a[gate], a_at + k + j + gate * gates);
                    multiply<kWhole>(sums, a, (b_at ^ j) + read_slot, rows);
                }
                leave_stage();
            }
        }

        // Add the product of the next tile. `rows` are the rows left; a tile uses up to kTileRows.
        inline void add(Sums &sums, unsigned char *kept, int rows, bool apart) {
            if (rows >= kTileRows)
                product<true>(sums, kept, rows, apart);
            else
                product<false>(sums, kept, rows, apart);
        }
    };
};

#endif
