// Which kernel computes an input projection, and its blocks. Where kinds of blocks are compared,
// they were measured on H100 and H200.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "cuda/host/plans/planner.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// A GPU, as far as projections depend on it.
struct Chip {
    std::string arch;  // such as "sm_90a"
    Clusters clusters;

    int64_t processors() const { return clusters.at(1); }
    bool has_clusters() const { return clusters.size() > 1; }
};

// A projection of one direction.
struct ProjectionSize {
    int64_t T, N, features;
    int planes;             // bytes of a code of x
    bool has_byte_weights;  // codes of W have one byte
    bool divides;           // the division by x's scale needs no branch, see `divides`
    RecurrenceShape shape;  // of the recurrence that reads the result

    int64_t units() const { return shape.units; }
    int64_t padded() const { return (features + 15) / 16 * 16; }
    int64_t rows() const { return T * shape.strips(N) * shape.strip(); }
    // Whether int32 holds sums of byte products, bias included.
    bool projects_bytes() const { return has_byte_weights && features <= 1 << 14; }
};

// The parameters of epilogue.cuh, which requantizes sums.
struct Epilogue {
    int planes;           // bytes of a code of x
    int codes = 0;        // of W x: 1 all of 8 bits, 2 more than 8, 3 all of 16 bits, 0 others
    bool powers = false;  // multipliers are powers of two
    bool longs = false;   // sums of two planes may exceed int32
    Rules rules{};

    Macros macros() const;
    bool operator==(const Epilogue &o) const {
        return std::tie(planes, codes, powers, longs, rules) ==
               std::tie(o.planes, o.codes, o.powers, o.longs, o.rules);
    }
};

// The epilogue of a plan's projection.
Epilogue epilogue_of(const CellNumbers &numbers);

bool is_power(float scale);

// Whether the kernels' division by a scale without branches gives exact codes of up to 16 bits.
bool divides(const QuantizerNumbers &x);
DivisionC division_of(const QuantizerNumbers &x);

// The tile of a block of codes_tiled.cu, see mma_tiled.cuh. A warp computes 16 units, and 8 rows
// per column.
struct Tile {
    int64_t unit_warps, row_warps, columns;

    int64_t units() const { return 16 * unit_warps; }
    int64_t rows() const { return 8 * columns * row_warps; }
    int64_t threads() const { return 32 * unit_warps * row_warps; }
    int64_t blocks(int64_t units, int64_t rows) const;
    Macros macros(const Epilogue &epilogue) const;
    Layout layout(int64_t units, int64_t rows, const Epilogue &epilogue) const;
    bool operator==(const Tile &o) const {
        return std::tie(unit_warps, row_warps, columns) ==
               std::tie(o.unit_warps, o.row_warps, o.columns);
    }
};

// A block of codes_weight_stationary.cu, which keeps its weights in shared memory.
struct WeightStationary {
    int64_t unit_warps;  // units per block divided by 16
    int64_t groups;      // of `unit_warps` warps; each group has rows of its own
    int64_t columns;     // of 8 rows per tile
    int64_t stages;      // of rows in the pipeline
    int64_t blocks;      // per multiprocessor

    int64_t threads() const { return 32 * unit_warps * groups; }
    int64_t tile_rows() const { return 8 * columns; }
    int64_t shared_bytes(int64_t padded, int planes) const;
    // Blocks that cover all units.
    int64_t across(int64_t units) const;
    Macros macros(const Epilogue &epilogue) const;
    // A grid that fills the multiprocessors once, and the rows per group.
    std::pair<Grid, int64_t> grid(int64_t units, int64_t rows, int64_t padded, int planes,
                                  int64_t processors) const;
    Kernel kernel(const Epilogue &epilogue) const;
    bool operator==(const WeightStationary &o) const {
        return std::tie(unit_warps, groups, columns, stages, blocks) ==
               std::tie(o.unit_warps, o.groups, o.columns, o.stages, o.blocks);
    }
};

// A block of reals_tiled.cu, see mma_activation_stationary.cuh. It processes several tiles.
struct TiledReals {
    int64_t unit_warps, row_warps, columns;
    int64_t stages;      // of weights in the pipeline
    int64_t blocks;      // per multiprocessor for which registers must suffice
    int64_t parts;       // blocks that share the units of the same rows
    int64_t depth = 64;  // features per stage

    int64_t units() const { return 16 * unit_warps; }
    int64_t rows() const { return 8 * columns * row_warps; }
    int64_t threads() const { return 32 * unit_warps * row_warps; }
    int64_t shared_bytes(int64_t all_units, int64_t padded, int planes) const;
    Macros macros(const Epilogue &epilogue) const;
    bool operator==(const TiledReals &o) const {
        return std::tie(unit_warps, row_warps, columns, stages, blocks, parts, depth) ==
               std::tie(o.unit_warps, o.row_warps, o.columns, o.stages, o.blocks, o.parts, o.depth);
    }
};

// A block of reals_wgmma.cu: two groups of four warps that alternate, see wgmma_pingpong.cuh.
struct Warpgroups {
    int64_t columns;  // of 8 rows; if columns * planes is odd, the product has one more
    int64_t parts;    // blocks that share the units of the same rows, a power of two
    int64_t units, padded;
    int planes = 1;

    int64_t threads() const { return 256; }
    int64_t rows() const { return 8 * columns; }
    int64_t product_rows() const { return 8 * planes * columns; }
    int64_t tiles() const;  // of 64 units, the most of a block
    int64_t group_tiles() const { return (tiles() + 1) / 2; }
    int64_t panels() const { return (padded + 127) / 128; }
    int64_t stages() const { return std::min<int64_t>(3, group_tiles() * panels()); }
    int64_t shared_bytes() const;
    Macros macros(const Epilogue &epilogue) const;
    bool operator==(const Warpgroups &o) const {
        return std::tie(columns, parts, units, padded, planes) ==
               std::tie(o.columns, o.parts, o.units, o.padded, o.planes);
    }
};

using CodeBlocks = std::variant<Tile, WeightStationary>;
using RealBlocks = std::variant<TiledReals, Warpgroups>;

// Blocks of a launch.
int64_t blocks_of(const RealBlocks &block, int64_t rows);

// What is in the macros of blocks that read real values besides their own.
struct RealRows {
    int64_t strip;     // rows of a strip of the recurrence
    int64_t features;  // per row
    bool exact;        // the inverse of the scale of x is
    bool whole;        // codes of x use the whole range of a byte
};
Macros macros_of(const RealBlocks &block, const Epilogue &epilogue, const RealRows &rows);
Layout layout_of(const RealBlocks &block, const Epilogue &epilogue, const ProjectionSize &size,
                 const QuantizerNumbers &x);

// What experiments and tests change.
struct ProjectionPolicy {
    // by planes: weight-stationary blocks, faster from this number of rows, and units * features
    std::array<WeightStationary, 2> stationary{{{4, 3, 8, 4, 1}, {4, 3, 4, 4, 1}}};
    int64_t stationary_rows = 8192, stationary_weights = 1 << 17;
    // warpgroups are fastest from this number of rows, and of rows * units * features
    int64_t group_rows = 1536, group_work = 20'000'000;
    bool reads_reals = true;           // projections may read real values
    std::optional<RealBlocks> reals;   // instead of the fastest ones
    bool overlaps = true;              // recurrences may start before their projections end
    int64_t overlap_steps = 64;        // from which an overlap pays
    int64_t overlap_work = 4'000'000;  // rows * units, if x would be projected from real values
    bool by_steps = false;             // recurrences run step by step even if weights fit registers
    double overlap_share = 0.9;  // the largest ratio of the projection's time to the recurrence's
};

// A projection that runs at the same time as the recurrence, on the clusters that it leaves free.
// The recurrence waits for whole time chunks, whose finished rows are counted.
struct Overlap {
    WeightStationary block;
    int64_t cluster;    // blocks per cluster, as in the recurrence
    int64_t clusters;   // the most that the projection uses
    int64_t chunk = 8;  // steps per time chunk, a power of two

    // Counters; loads also check one after that of the last chunk.
    int64_t chunks(int64_t T) const { return T / chunk + 2; }
    // Blocks with the same units, or 0 if none gives whole clusters.
    int64_t strips(int64_t units) const;
    Grid grid(int64_t units, int64_t padded, int planes) const;
    // The estimated nanoseconds.
    double time(int64_t units, int64_t rows, int64_t padded, int planes) const;
    bool operator==(const Overlap &o) const {
        return block == o.block &&
               std::tie(cluster, clusters, chunk) == std::tie(o.cluster, o.clusters, o.chunk);
    }
};

enum class Projection { reals_few, reals_tiled, codes_few, bytes, products };

constexpr bool reads_reals(Projection method) {
    return method == Projection::reals_few || method == Projection::reals_tiled;
}

// The projection that measured fastest among those applicable.
struct Selection {
    Projection method;
    std::optional<RealBlocks> reals{};  // of reals_tiled
    std::optional<CodeBlocks> codes{};  // of bytes
};

Tile choose_tile(int64_t units, int64_t rows, int planes, int64_t processors);

// `alone`: whether a block may use all shared memory of a multiprocessor. Nothing if a projection
// from codes is faster.
std::optional<TiledReals> choose_tiled(int64_t units, int64_t rows, int64_t padded, int planes,
                                       int64_t processors, bool alone);
std::optional<Warpgroups> choose_warpgroups(int64_t units, int64_t rows, int64_t padded, int planes,
                                            int64_t processors,
                                            const ProjectionPolicy &policy = {});

// Blocks that keep their weights, or nothing if a tile is faster. The kernel reads unpadded rows.
std::optional<WeightStationary> weight_stationary(const Chip &chip, const ProjectionSize &size,
                                                  const ProjectionPolicy &policy = {});

// Nothing if blocks from codes are faster.
std::optional<RealBlocks> choose_reals(const Chip &chip, const ProjectionSize &size,
                                       const ProjectionPolicy &policy = {});

// Nothing if no overlap pays. `form` is that of the recurrence.
std::optional<Overlap> overlap_of(const Chip &chip, const ProjectionSize &size, const Form &form,
                                  const ProjectionPolicy &policy = {});

// `real_values`: whether x is given as real values; otherwise as codes.
Selection select_projection(const Chip &chip, const ProjectionSize &size, bool real_values,
                            const std::optional<Overlap> &overlap,
                            const ProjectionPolicy &policy = {});

}  // namespace quant_gru::cuda
