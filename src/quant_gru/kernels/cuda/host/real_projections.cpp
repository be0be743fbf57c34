// Input projections from real values in one launch, on tensor cores. The choice of blocks follows
// the Python package's kernels/cuda/projection/from_reals.py, where they were measured.
#include <algorithm>
#include <optional>

#include "cuda/host/projections.hpp"
#include "cuda/host/stationary.hpp"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kMostFeatures = 384;  // with more, blocks that stream rows are faster
constexpr int64_t kManyRows = 4096;     // up to this number, small blocks are faster
constexpr int64_t kStationaryWeights = 1 << 18;
constexpr int64_t kBlockOverhead = 24, kGroupOverhead = 90;  // work besides the product, in rows
constexpr int64_t kGroupRows = 1536, kGroupWork = 20'000'000;
constexpr int64_t kFewTiles = 2;
constexpr int64_t kFeaturesAtOnce = 128;  // that the lanes of a warp load

int64_t whole(int64_t v, int64_t unit) { return (v + unit - 1) / unit; }

// What a choice depends on.
struct Work {
    int64_t units, rows, padded;
    int planes;
    int64_t processors;
};

// A launch of the kernel.
struct Blocks {
    bool groups;  // reals_wgmma.cu, otherwise reals_tiled.cu
    int64_t rows, parts, threads, shared_bytes;
    Macros macros;
};

// A block of reals_tiled.cu, see mma_activation_stationary.cuh.
struct Tiled {
    int64_t unit_warps, row_warps, columns, stages, blocks, parts, depth;

    int64_t units() const { return 16 * unit_warps; }
    int64_t rows() const { return 8 * columns * row_warps; }
    int64_t shared_bytes(const Work &w) const {
        const int64_t own = whole(whole(w.units, units()), parts) * units();
        const int64_t kept =
            w.planes * (rows() + columns % 2 * 8) * (whole(w.padded, 32) * 32 + 16);
        return stages * depth * 3 * units() + kept + 12 * rows() + 36 * own;
    }
    // Rows that a multiprocessor processes in sequence, overhead included.
    int64_t in_series(const Work &w) const {
        return whole(whole(w.rows, rows()), w.processors) * (rows() + kBlockOverhead);
    }
};

constexpr Tiled kSmall{2, 2, 2, 4, 4, 1, 64}, kMedium{4, 2, 4, 4, 2, 1, 64};
constexpr Tiled kTall{2, 2, 8, 4, 3, 1, 64}, kTwoPlanes{2, 2, 2, 4, 3, 1, 64};

// One block per multiprocessor, whose many rows make loads of weights rare.
Tiled alone_on_multiprocessor(const Work &w) {
    const std::vector<int64_t> columns =
        w.planes == 1 ? std::vector<int64_t>{5, 7, 8, 10, 13} : std::vector<int64_t>{4, 5, 6, 7};
    std::optional<Tiled> best;
    for (const int64_t each : columns) {
        const Tiled block =
            w.planes == 1 ? Tiled{8, 1, each, 3, 1, 1, 128} : Tiled{4, 2, each, 3, 1, 1, 128};
        if (!best || block.in_series(w) < best->in_series(w)) best = block;
    }
    return *best;
}

std::optional<Blocks> tiled_blocks(const Work &w, bool may_be_alone) {
    if (w.padded > kMostFeatures) return std::nullopt;
    Tiled block = w.planes == 1 ? kSmall : kTwoPlanes;
    int64_t at_once = w.planes == 1 ? 2 : 7;
    bool tall = false;
    if (w.planes == 1 && w.rows > kManyRows) {
        tall = 2 * w.rows >= 3 * w.processors * kTall.rows();
        block = tall ? kTall : kMedium;
    }
    if (may_be_alone && w.rows > kManyRows && !tall) {
        const Tiled large = alone_on_multiprocessor(w);
        if (large.shared_bytes(w) <= kMostShared) {
            block = large;
            at_once = 1;
        }
    }
    const int64_t strips = whole(w.rows, block.rows()), tiles = whole(w.units, block.units());
    while (2 * block.parts <= tiles && 2 * block.parts * strips <= w.processors * at_once)
        block.parts *= 2;
    Blocks found{false,
                 block.rows(),
                 block.parts,
                 32 * block.unit_warps * block.row_warps,
                 block.shared_bytes(w),
                 {}};
    found.macros["UNIT_WARPS"] = std::to_string(block.unit_warps);
    found.macros["ROW_WARPS"] = std::to_string(block.row_warps);
    found.macros["COLUMNS"] = std::to_string(block.columns);
    found.macros["STAGES"] = std::to_string(block.stages);
    found.macros["BLOCKS"] = std::to_string(block.blocks);
    found.macros["DEPTH"] = std::to_string(block.depth);
    return found;
}

// A block of reals_wgmma.cu: two groups of four warps that alternate.
struct Warpgroups {
    int64_t columns, parts;

    int64_t rows() const { return 8 * columns; }
    int64_t tiles(const Work &w) const { return whole(whole(w.units, 64), parts); }
    int64_t group_tiles(const Work &w) const { return whole(tiles(w), 2); }
    int64_t panels(const Work &w) const { return whole(w.padded, 128); }
    int64_t stages(const Work &w) const { return std::min<int64_t>(3, group_tiles(w) * panels(w)); }
    int64_t product_rows(const Work &w) const { return 8 * w.planes * columns; }
    int64_t shared_bytes(const Work &w) const {
        const int64_t lines = 2 * stages(w) * 3 * 64 + panels(w) * product_rows(w);
        return 128 * lines + 2 * 8 * stages(w) + 12 * rows() + 6 * 4 * 64 * tiles(w);
    }
    int64_t count(const Work &w) const { return whole(w.rows, rows()) * parts; }
    // Work in rows times tiles, overhead included.
    int64_t time(const Work &w) const {
        return whole(count(w), w.processors) *
               (kGroupOverhead + group_tiles(w) * w.planes * rows());
    }
};

std::optional<Blocks> warpgroup_blocks(const Work &w) {
    if (w.rows < kGroupRows || w.rows * w.units * w.padded < kGroupWork || w.padded > kMostFeatures)
        return std::nullopt;
    std::optional<Warpgroups> best;
    // each power of two up to the number of tiles
    for (int64_t parts = 1; parts <= whole(w.units, 64); parts *= 2)
        for (const int64_t all : {8, 10, 12, 13, 14}) {
            const Warpgroups each{all / w.planes, parts};
            if (all % w.planes || each.shared_bytes(w) > kMostShared) continue;
            // padding of the product matters only where it is most of the work
            if (each.product_rows(w) % 16 && each.group_tiles(w) > kFewTiles) continue;
            if (!best || each.time(w) < best->time(w)) best = each;
        }
    // one tile uses only one group, which saves less than a second wave costs
    if (best && w.planes == 2 && w.units <= 64 && (best->count(w) - 1) / w.processors == 1)
        return std::nullopt;
    if (!best) return std::nullopt;
    Blocks found{true, best->rows(), best->parts, 256, best->shared_bytes(w), {}};
    found.macros["COLUMNS"] = std::to_string(best->columns);
    found.macros["STAGES"] = std::to_string(best->stages(w));
    found.macros["STEPS"] = std::to_string(whole(w.padded, 32));
    return found;
}

std::optional<Blocks> blocks_for(const Launches &to, const Cell &cell, const Projected &out) {
    Device &device = to.network.device;
    const Work work{out.units, to.T * out.strips * out.strip, cell.bytes().padded, cell.x_planes(),
                    device.multiprocessors()};
    if (work.units * work.padded >= kStationaryWeights && keeps_weights(to, cell, out))
        return std::nullopt;
    if (device.arch() == "sm_90a")
        if (auto found = warpgroup_blocks(work)) return found;
    return tiled_blocks(work, device.clusters().size() > 1);
}

}  // namespace

bool has_real_blocks(const Launches &to, const Cell &cell, const Projected &out) {
    return blocks_for(to, cell, out).has_value();
}

void project_reals_tiled(Launches &to, Cell &cell, const Projected &out, Address nan) {
    const Blocks blocks = *blocks_for(to, cell, out);
    const QuantizerNumbers &x = cell.numbers().x;
    ProjectRealsC p{};
    p.to = epilogue_of(to, cell, out);
    if (blocks.groups) p.to.weights = cell.tiles();
    p.nan = nan;
    p.step = to.x_step();
    p.next = to.x_next();
    p.C = cell.C();
    p.nan_stride = to.flag_stride();
    p.parts = blocks.parts;
    p.zero = x.zero - cell.x_offset();
    p.division = division_of(x);
    Kernel kernel{blocks.groups ? "projection/reals_wgmma" : "projection/reals_tiled",
                  blocks.groups ? "project_groups" : "project_reals", epilogue_macros(cell)};
    kernel.macros.insert(blocks.macros.begin(), blocks.macros.end());
    kernel.macros["STRIP"] = std::to_string(out.strip);
    kernel.macros["SHORT"] = cell.C() <= kFeaturesAtOnce ? "1" : "0";
    kernel.macros["FOURS"] = cell.C() % 4 == 0 ? "1" : "0";
    kernel.macros["EXACT"] = is_power(x.scale) ? "1" : "0";
    kernel.macros["WHOLE"] = x.hi() - x.lo() == 255 ? "1" : "0";
    Grid grid;
    grid.x =
        static_cast<unsigned>(whole(to.T * out.strips * out.strip, blocks.rows) * blocks.parts);
    grid.threads = static_cast<unsigned>(blocks.threads);
    grid.shared_bytes = static_cast<unsigned>(blocks.shared_bytes);
    to.add(kernel, grid, p);
    to.point(place_of(p, p.real), Given::x);
    if (cell.C() % 4 == 0) to.last().fours_at = place_of(p, p.fours);
}

}  // namespace quant_gru::cuda
