// The launch shapes of a backward. Estimates of times were measured on an H200.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/host/plans/planner.hpp"

namespace quant_gru::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Environment variables with the shape of all recurrences; for experiments:
// blocks,tiles,split,rows of those in clusters; blocks,tiles,columns,warps,parked,chunk,ahead of
// those over the whole GPU, or none.
constexpr char kBackVariable[] = "QUANT_GRU_CUDA_BACK_SHAPE";
constexpr char kBackGridVariable[] = "QUANT_GRU_CUDA_BACK_GRID";

// How operands.cu stores R transposed for a recurrence.
struct TransposedLayout {
    int64_t U = 0, CL = 0, MT = 0, KS = 0, KP = 0, WP = 0, groups = 0;
    int64_t count = 0;  // words; 0 if a recurrence does not read it
};

// The recurrence of gradients in clusters; see backward/recurrence.cu.
struct BackShape {
    int64_t units;          // per block, a multiple of 8
    int64_t blocks;         // per cluster
    int64_t tiles;          // of 16 rows of R transposed, per warp
    int64_t split;          // warps that share the depth of these tiles
    int64_t rows;           // per tile of the batch: 1, 2, 4 or 8
    int64_t planes;         // bfloat16 parts of a gradient
    int64_t weight_planes;  // bfloat16 parts of a weight

    int64_t depth() const;   // gradients per block and row, padded
    int64_t groups() const;  // of `tiles` tiles; each has `split` warps
    int64_t threads() const { return groups() * split * 32; }
    int64_t elements() const;  // per thread
    int64_t weight_registers() const;
    int64_t shared_bytes() const;
    // Whether blocks exchange sums in bfloat16.
    bool packed() const { return planes == 1 && blocks > 1 && rows == 8; }
    // Whether a block's weights fit registers, and its other data shared memory.
    bool fits() const;
    // The estimated nanoseconds per step. `full`: the busy share of the GPU, 0 to 1.
    double step_time(double full) const;
    TransposedLayout layout() const;
    Macros macros(bool half, int operand, int directions) const;
};

// The shapes that a GPU can run.
std::vector<BackShape> possible_back_shapes(int64_t H, int64_t planes, int64_t weight_planes,
                                            const Clusters &clusters);

// The shape with the least estimated time, or nothing if weights do not fit registers. Throws
// std::invalid_argument if `kBackVariable` names none.
std::optional<BackShape> choose_back_shape(int64_t H, int64_t N, int64_t directions, int64_t planes,
                                           int64_t weight_planes, const Clusters &clusters);

// The recurrence of gradients over a whole GPU; see backward/recurrence_grid.cu.
struct BackGridShape {
    int64_t H;
    int64_t blocks;   // per cluster
    int64_t tiles;    // of 16 units per block
    int64_t columns;  // tiles of 8 rows per block
    int64_t warps;    // per block
    int64_t parked;   // loads whose weights are in shared memory
    int64_t chunk;    // loads of a row that are checked at once
    int64_t ahead;    // checks by which loads run ahead

    int64_t loads() const;  // per row and warp, of 32 gradients each
    int64_t rows() const { return 8 * columns; }
    int64_t groups() const;  // clusters that share the units
    int64_t threads() const { return 32 * warps; }
    int64_t registers() const;  // estimated, per thread
    // Pairs of units in all rows of a block.
    int64_t pairs() const { return 64 * tiles * columns; }
    int64_t shared_bytes() const;
    // Clusters of a launch, all of which must be resident at once.
    int64_t clusters(int64_t N) const;
    // The estimated microseconds per step.
    double step_time(int64_t N) const;
    TransposedLayout layout() const;
    Macros macros(bool half) const;
};

// The shapes whose blocks are all resident at once. H is a multiple of 8.
std::vector<BackGridShape> possible_back_grids(int64_t H, int64_t N, const Clusters &clusters);

// Whether the environment asks for such a shape, even if weights fit a cluster.
bool wants_back_grid();

// The shape with the least estimated time, or nothing if step by step is no slower. Throws
// std::invalid_argument if `kBackGridVariable` names none.
std::optional<BackGridShape> choose_back_grid(int64_t H, int64_t N, const Clusters &clusters);

// The derivatives of bytes; see backward/local_derivatives_bytes.cu.
struct DerivativesShape {
    int64_t unit_warps;                  // units per block divided by 16
    int64_t groups;                      // of `unit_warps` warps; each group has rows of its own
    std::pair<int64_t, int64_t> padded;  // features of x and of the state, to multiples of 16
    int64_t table_bytes;                 // of shared memory

    int64_t threads() const { return 32 * unit_warps * groups; }
    int64_t shared_bytes() const;  // tables, stages of rows, and weights
    Macros macros() const;
    // The grid for a number of multiprocessors, and the rows per group.
    std::pair<Grid, int64_t> grid(int64_t H, int64_t rows, int64_t directions,
                                  int64_t processors) const;
};

// The shape with the most units per block that fits and leaves few units idle, or nothing if
// weights do not fit shared memory. `clusters`: whether the GPU has them; others have less memory.
std::optional<DerivativesShape> choose_derivatives(int64_t H, int64_t rows,
                                                   std::pair<int64_t, int64_t> padded,
                                                   int64_t table_bytes, bool clusters);

}  // namespace quant_gru::cuda
