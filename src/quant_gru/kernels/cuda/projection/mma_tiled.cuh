// Tiled int8 GEMM on tensor cores: the weights of units' three gates times rows of activations.
//
//   typedef Multiplier<unit warps, row warps, columns, stages> Tile;
//   Tile::Sums sums;                     // the caller initializes them to 0 or to biases
//   Tile::add<unsigned rows>(sums, shared, weights, H, first_unit, padded, row_of, apart);
//
// A block of Tile::kThreads threads adds W x for Tile::kUnits units, starting at `first_unit`, and
// for Tile::kRows rows. `weights` are int8 (3H, padded), channel = gate * H + unit, as stored by
// `Numbers.gemm`. `row_of(i)` is the address of row i of the block, `padded` bytes, or null for
// zeros. `padded` and addresses are multiples of 16. Units beyond H are zeros. `shared` has
// Tile::kSharedBytes bytes, aligned to 128. The next `add` may reuse it at once; other code needs a
// barrier first.
//
// sums[gate][column][i] of a thread belongs to unit `Tile::unit(i)` and row `Tile::row(column, i)`
// of the block. In each 16 units and 8 rows, a thread has units lane / 4 and lane / 4 + 8, and rows
// lane % 4 * 2 and lane % 4 * 2 + 1; if `apart`, rows lane % 4 and lane % 4 + 4.
#ifndef QUANT_GRU_MULTIPLY_CUH
#define QUANT_GRU_MULTIPLY_CUH

#include "kernel_runtime/cuda/ptx.cuh"

// Multiply 32 features of 16 units and of kColumns columns of 8 rows, and add to `sums`. `units`
// and `rows` are a lane's addresses for `load_matrices`: `units` of the first gate, `next_gate`
// bytes between gates; `rows` of the first two columns, `next_pair` bytes between pairs of columns.
template <bool kUnsignedRows, int kColumns>
inline void multiply_gates(int (&sums)[3][kColumns][4], uint32_t units, int next_gate,
                           uint32_t rows, int next_pair) {
    uint32_t a[3][4], b[kColumns / 2][4];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) load_matrices(a[gate], units + gate * next_gate);
#pragma unroll
    for (int pair = 0; pair < kColumns / 2; ++pair) load_matrices(b[pair], rows + pair * next_pair);
#pragma unroll
    for (int column = 0; column < kColumns; ++column)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            mma<false, kUnsignedRows>(sums[gate][column], a[gate], b[column / 2][column % 2 * 2],
                                      b[column / 2][column % 2 * 2 + 1]);
}

template <int kUnitWarps, int kRowWarps, int kColumns, int kStages>
struct Multiplier {
    static constexpr int kThreads = 32 * kUnitWarps * kRowWarps;
    static constexpr int kUnits = 16 * kUnitWarps, kRows = 8 * kColumns * kRowWarps;
    static constexpr int kDepth = 64;  // bytes of a row per stage
    static constexpr int kLines = 3 * kUnits + kRows, kStageBytes = kLines * kDepth;
    static constexpr int kSharedBytes = kStages * kStageBytes;
    static constexpr int kLoads = kLines * 4 / kThreads;  // of 16 bytes, per thread and stage
    typedef int Sums[3][kColumns][4];

    static_assert(kColumns % 2 == 0, "columns are loaded two at a time");
    static_assert(kLines * 4 % kThreads == 0, "threads load alike");

    static inline int unit(int i) {
        return threadIdx.x / 32 % kUnitWarps * 16 + i / 2 * 8 + threadIdx.x % 32 / 4;
    }
    static inline int row(int column, int i) {
        return (threadIdx.x / 32 / kUnitWarps * kColumns + column) * 8 + threadIdx.x % 4 * 2 +
               i % 2;
    }

    // 8 lines that are read at once lie in different banks.
    static inline uint32_t place(int line, int chunk) {
        return line * kDepth + ((chunk ^ (line >> 1 & 3)) << 4);
    }

    template <bool kUnsignedRows, class RowOf>
    static inline void add(Sums &sums, unsigned char *shared, const int8_t *weights, int64_t H,
                           int64_t first_unit, int64_t padded, const RowOf &row_of,
                           bool apart = false) {
        const int line = threadIdx.x / 4, chunk = threadIdx.x % 4, bytes = (int)padded;
        const unsigned char *from[kLoads];
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const int at = line + j * (kThreads / 4);
            if (at < 3 * kUnits) {
                const int64_t unit = first_unit + at % kUnits;
                const int64_t channel = at / kUnits * H + unit;
                from[j] = unit < H ? (const unsigned char *)weights + channel * padded : nullptr;
            } else {
                from[j] = (const unsigned char *)row_of(at - 3 * kUnits);
            }
        }
        const uint32_t memory = shared_address(shared), to = memory + place(line, chunk);
        const int steps = (bytes + kDepth - 1) / kDepth;
        const auto load = [&](int step) {
            const int k = step * kDepth + chunk * 16;
            const uint32_t stage = to + step % kStages * kStageBytes;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const bool there = from[j] && k < bytes;
                copy_async(stage + j * (kThreads / 4) * kDepth,
                           there ? from[j] + k : (const unsigned char *)weights, there);
            }
        };

        __syncthreads();  // all reads of the previous `add` have finished
#pragma unroll
        for (int step = 0; step < kStages - 1; ++step) {
            if (step < steps) load(step);
            copies_commit();
        }
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const uint32_t a_at = memory + place(warp % kUnitWarps * 16 + lane % 16, lane / 16);
        const uint32_t b_at =
            memory + 3 * kUnits * kDepth +
            place(warp / kUnitWarps * kColumns * 8 + lane / 16 * 8 + row_of_eight(lane % 8, apart),
                  lane / 8 % 2);
        for (int step = 0; step < steps; ++step) {
            copies_wait<kStages - 2>();
            __syncthreads();
            if (step + kStages - 1 < steps) load(step + kStages - 1);
            copies_commit();
            const uint32_t stage = step % kStages * kStageBytes;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (j && step * kDepth + 32 >= bytes) break;
                multiply_gates<kUnsignedRows>(sums, (a_at ^ (j * 32)) + stage, kUnits * kDepth,
                                              (b_at ^ (j * 32)) + stage, 16 * kDepth);
            }
        }
    }
};

#endif
