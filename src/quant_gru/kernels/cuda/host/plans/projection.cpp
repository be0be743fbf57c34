#include "cuda/host/plans/projection.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace quant_gru::cuda {
namespace {

constexpr int64_t kStages = 4, kDepth = 64;  // of rows: stages, and bytes of a row per stage
constexpr int64_t kReserved = 1024;          // bytes of shared memory per block for the system
constexpr int64_t kFewBlocks = 256;          // fewer blocks leave much of a GPU idle
constexpr int64_t kLargeAtOnce = 3;          // resident large tiles per multiprocessor
constexpr int64_t kFewRows = 64;             // up to which a warp computes each unit from codes
constexpr int64_t kFewestReals = 8;          // the same from real values
constexpr int64_t kMostSummed = int64_t{1} << 17;  // features whose byte products int32 sums
constexpr double kLargestScale = 0x1p90;

constexpr Tile kSmallTile{2, 2, 2}, kMediumTile{2, 2, 4}, kLargeTile{2, 2, 8};

constexpr int64_t kMostFeatures = 384;  // with more, blocks that stream rows are faster
constexpr int64_t kManyRows = 4096;     // up to this number, small blocks are faster
constexpr int64_t kStationaryWeights = 1 << 18;
constexpr int64_t kBlockOverhead = 24, kGroupOverhead = 90;  // work besides the product, in rows
constexpr int64_t kFewTiles = 2;          // per group, up to which an odd number of columns pays
constexpr int64_t kFeaturesAtOnce = 128;  // that the lanes of a warp load

constexpr TiledReals kSmall{2, 2, 2, 4, 4, 1}, kMedium{4, 2, 4, 4, 2, 1};
constexpr TiledReals kTall{2, 2, 8, 4, 3, 1}, kTwoPlanes{2, 2, 2, 4, 3, 1};

int64_t whole(int64_t v, int64_t unit) { return (v + unit - 1) / unit; }

std::string text(int64_t number) { return std::to_string(number); }

// For a kernel that requantizes sums.
Macros with(const Epilogue &epilogue, Macros macros) {
    macros.merge(epilogue.macros());
    macros.insert(kPlain.begin(), kPlain.end());
    return macros;
}

const WeightStationary &stationary_of(const ProjectionPolicy &policy, int planes) {
    return policy.stationary[static_cast<size_t>(planes - 1)];
}

bool can_keep_weights(const Chip &chip, const ProjectionSize &size,
                      const ProjectionPolicy &policy) {
    const WeightStationary &block = stationary_of(policy, size.planes);
    const int64_t units = 16 * block.unit_warps, idle = (units - size.units() % units) % units;
    return block.shared_bytes(size.padded(), size.planes) <= kMostShared &&
           size.N % size.shape.rows == 0 && 8 * idle <= size.units() && chip.has_clusters();
}

// The rows that a multiprocessor processes in sequence, overhead included.
int64_t in_series(const TiledReals &block, int64_t rows, int64_t processors) {
    return whole(whole(rows, block.rows()), processors) * (block.rows() + kBlockOverhead);
}

// One block per multiprocessor, whose many rows make loads of weights rare.
TiledReals alone_on_multiprocessor(int64_t rows, int planes, int64_t processors) {
    const std::vector<int64_t> columns =
        planes == 1 ? std::vector<int64_t>{5, 7, 8, 10, 13} : std::vector<int64_t>{4, 5, 6, 7};
    std::optional<TiledReals> best;
    for (const int64_t each : columns) {
        const TiledReals block = planes == 1 ? TiledReals{8, 1, each, 3, 1, 1, 128}
                                             : TiledReals{4, 2, each, 3, 1, 1, 128};
        if (!best || in_series(block, rows, processors) < in_series(*best, rows, processors))
            best = block;
    }
    return *best;
}

// The work of a group in rows times tiles, overhead included.
int64_t work_of(const Warpgroups &block, int64_t rows, int64_t processors) {
    return whole(blocks_of(block, rows), processors) *
           (kGroupOverhead + block.group_tiles() * block.planes * block.rows());
}

}  // namespace

const Macros kPlain{
    {"QG_WORDS", "0"}, {"QG_RRH", "1"}, {"QG_OLD", "1"}, {"QG_NEW", "1"}, {"QG_ZONEOUT", "0"}};

Macros Epilogue::macros() const {
    Macros found = rules.macros();
    found["PLANES"] = text(planes);
    found["CODES"] = text(codes);
    found["POWERS"] = text(powers);
    found["LONG"] = text(longs);
    return found;
}

Epilogue epilogue_of(const CellNumbers &n) {
    const int planes = planes_of(n.x.bits);
    const int64_t range = n.Wx.hi() - n.Wx.lo();
    const int codes = n.Wx.bits <= 8 ? range == 255 : planes == 2 && range == 65535 ? 3 : 2;
    // with many features, sums of two planes exceed int32 too often
    return {planes, codes, is_power(n.x.scale) && is_power(n.Wx.scale),
            planes == 2 && n.W.inputs > 512, rules_of(n)};
}

bool is_power(float scale) {
    int exponent;
    return std::frexp(scale, &exponent) == 0.5f;
}

bool divides(const QuantizerNumbers &x) {
    const double scale = x.scale;
    return 1 / kLargestScale <= scale && scale <= kLargestScale;
}

DivisionC division_of(const QuantizerNumbers &x) {
    // float64 has over twice the bits of float32, so double rounding equals a single rounding
    const double scale = x.scale;
    return {x.scale, static_cast<float>(1 / scale),
            static_cast<float>(static_cast<double>(x.lo() - x.zero) * scale),
            static_cast<float>(static_cast<double>(x.hi() - x.zero) * scale), is_power(x.scale)};
}

int64_t Tile::blocks(int64_t all_units, int64_t all_rows) const {
    return whole(all_units, units()) * whole(all_rows, rows());
}

Macros Tile::macros(const Epilogue &epilogue) const {
    return with(epilogue, {{"UNIT_WARPS", text(unit_warps)},
                           {"ROW_WARPS", text(row_warps)},
                           {"COLUMNS", text(columns)},
                           {"STAGES", text(kStages)}});
}

Layout Tile::layout(int64_t all_units, int64_t all_rows, const Epilogue &epilogue) const {
    Grid grid;
    grid.x = static_cast<unsigned>(blocks(all_units, all_rows));
    grid.threads = static_cast<unsigned>(threads());
    grid.shared_bytes = static_cast<unsigned>(kStages * kDepth * (3 * units() + rows()));
    return {{"projection/codes_tiled", "project_bytes", macros(epilogue)}, grid};
}

int64_t WeightStationary::shared_bytes(int64_t padded, int planes) const {
    const int64_t rings = groups * stages * kDepth * 8 * columns * planes;
    return rings + 48 * unit_warps * (whole(padded, 32) * 32 + 16);
}

int64_t WeightStationary::across(int64_t units) const { return whole(units, 16 * unit_warps); }

Macros WeightStationary::macros(const Epilogue &epilogue) const {
    return with(epilogue, {{"UNIT_WARPS", text(unit_warps)},
                           {"GROUPS", text(groups)},
                           {"COLUMNS", text(columns)},
                           {"STAGES", text(stages)},
                           {"BLOCKS", text(blocks)}});
}

std::pair<Grid, int64_t> WeightStationary::grid(int64_t units, int64_t rows, int64_t padded,
                                                int planes, int64_t processors) const {
    const int64_t shared = shared_bytes(padded, planes);
    const int64_t fitting = (kMostShared + kReserved) / (shared + kReserved);
    const int64_t at_once = processors * std::max<int64_t>(1, std::min(blocks, fitting));
    const int64_t most = std::max<int64_t>(1, at_once / across(units));
    const int64_t share = 8 * whole(rows, 8 * most * groups);
    Grid grid;
    grid.x = static_cast<unsigned>(across(units) * whole(rows, share * groups));
    grid.threads = static_cast<unsigned>(threads());
    grid.shared_bytes = static_cast<unsigned>(shared);
    return {grid, share};
}

Kernel WeightStationary::kernel(const Epilogue &epilogue) const {
    return {"projection/codes_weight_stationary", "project_passing", macros(epilogue)};
}

int64_t TiledReals::shared_bytes(int64_t all_units, int64_t padded, int planes) const {
    const int64_t own = whole(whole(all_units, units()), parts) * units();
    const int64_t kept = planes * (rows() + columns % 2 * 8) * (whole(padded, 32) * 32 + 16);
    return stages * depth * 3 * units() + kept + 12 * rows() + 36 * own;
}

Macros TiledReals::macros(const Epilogue &epilogue) const {
    return with(epilogue, {{"UNIT_WARPS", text(unit_warps)},
                           {"ROW_WARPS", text(row_warps)},
                           {"COLUMNS", text(columns)},
                           {"STAGES", text(stages)},
                           {"BLOCKS", text(blocks)},
                           {"DEPTH", text(depth)}});
}

int64_t Warpgroups::tiles() const { return whole(whole(units, 64), parts); }

int64_t Warpgroups::shared_bytes() const {
    const int64_t lines = 2 * stages() * 3 * 64 + panels() * product_rows();
    return 128 * lines + 2 * 8 * stages() + 12 * rows() + 6 * 4 * 64 * tiles();
}

Macros Warpgroups::macros(const Epilogue &epilogue) const {
    return with(epilogue, {{"COLUMNS", text(columns)},
                           {"STAGES", text(stages())},
                           {"STEPS", text(whole(padded, 32))}});
}

int64_t blocks_of(const RealBlocks &block, int64_t rows) {
    return std::visit([&](const auto &b) { return whole(rows, b.rows()) * b.parts; }, block);
}

Macros macros_of(const RealBlocks &block, const Epilogue &epilogue, const RealRows &rows) {
    Macros macros = std::visit([&](const auto &b) { return b.macros(epilogue); }, block);
    macros["STRIP"] = text(rows.strip);
    macros["SHORT"] = text(rows.features <= kFeaturesAtOnce);
    macros["FOURS"] = text(rows.features % 4 == 0);
    macros["EXACT"] = text(rows.exact);
    macros["WHOLE"] = text(rows.whole);
    return macros;
}

Layout layout_of(const RealBlocks &block, const Epilogue &epilogue, const ProjectionSize &size,
                 const QuantizerNumbers &x) {
    const auto *groups = std::get_if<Warpgroups>(&block);
    const auto *tiled = std::get_if<TiledReals>(&block);
    Grid grid;
    grid.x = static_cast<unsigned>(blocks_of(block, size.rows()));
    grid.threads = static_cast<unsigned>(groups ? groups->threads() : tiled->threads());
    grid.shared_bytes = static_cast<unsigned>(
        groups ? groups->shared_bytes()
               : tiled->shared_bytes(size.units(), size.padded(), size.planes));
    const RealRows rows{size.shape.strip(), size.features, is_power(x.scale),
                        x.hi() - x.lo() == 255};
    return {{groups ? "projection/reals_wgmma" : "projection/reals_tiled",
             groups ? "project_groups" : "project_reals", macros_of(block, epilogue, rows)},
            grid};
}

int64_t Overlap::strips(int64_t units) const {
    const int64_t across = block.across(units);
    for (int64_t n = cluster * clusters / across; n > 0; --n)
        if (n * across % cluster == 0) return n;
    return 0;
}

Grid Overlap::grid(int64_t units, int64_t padded, int planes) const {
    Grid grid;
    grid.x = static_cast<unsigned>(block.across(units) * strips(units));
    grid.threads = static_cast<unsigned>(block.threads());
    grid.cluster = static_cast<unsigned>(cluster);
    grid.shared_bytes = static_cast<unsigned>(block.shared_bytes(padded, planes));
    return grid;
}

double Overlap::time(int64_t units, int64_t rows, int64_t padded, int planes) const {
    // nanoseconds of a block per row and unit, and those per row, unit and feature
    const double each = planes == 1 ? 0.39 : 1.0, feature = planes == 1 ? 0.00038 : 0.00085;
    const int64_t blocks = std::max<int64_t>(1, block.across(units) * strips(units));
    return static_cast<double>(rows * units) * (each + feature * static_cast<double>(padded)) /
           static_cast<double>(blocks);
}

Tile choose_tile(int64_t units, int64_t rows, int planes, int64_t processors) {
    if (kMediumTile.blocks(units, rows) < kFewBlocks) return kSmallTile;
    // larger tiles read operands less often, but their last wave may leave most of a GPU idle
    const int64_t blocks = kLargeTile.blocks(units, rows), at_once = kLargeAtOnce * processors;
    const double busy =
        static_cast<double>(blocks) / static_cast<double>(at_once * whole(blocks, at_once));
    return planes == 1 && busy > 0.6 ? kLargeTile : kMediumTile;
}

std::optional<TiledReals> choose_tiled(int64_t units, int64_t rows, int64_t padded, int planes,
                                       int64_t processors, bool alone) {
    if (padded > kMostFeatures) return std::nullopt;
    TiledReals block = planes == 1 ? kSmall : kTwoPlanes;
    int64_t at_once = planes == 1 ? 2 : 7;
    bool tall = false;
    if (planes == 1 && rows > kManyRows) {
        tall = 2 * rows >= 3 * processors * kTall.rows();
        block = tall ? kTall : kMedium;
    }
    if (alone && rows > kManyRows && !tall) {
        const TiledReals large = alone_on_multiprocessor(rows, planes, processors);
        if (large.shared_bytes(units, padded, planes) <= kMostShared) {
            block = large;
            at_once = 1;
        }
    }
    const int64_t strips = whole(rows, block.rows()), tiles = whole(units, block.units());
    while (2 * block.parts <= tiles && 2 * block.parts * strips <= processors * at_once)
        block.parts *= 2;
    return block;
}

std::optional<Warpgroups> choose_warpgroups(int64_t units, int64_t rows, int64_t padded, int planes,
                                            int64_t processors, const ProjectionPolicy &policy) {
    if (rows < policy.group_rows || rows * units * padded < policy.group_work ||
        padded > kMostFeatures)
        return std::nullopt;
    std::optional<Warpgroups> best;
    for (int64_t parts = 1; parts <= whole(units, 64); parts *= 2)
        for (const int64_t all : {8, 10, 12, 13, 14}) {
            const Warpgroups each{all / planes, parts, units, padded, planes};
            if (all % planes || each.shared_bytes() > kMostShared) continue;
            // padding of the product matters only where it is most of the work
            if (each.product_rows() % 16 && each.group_tiles() > kFewTiles) continue;
            if (!best || work_of(each, rows, processors) < work_of(*best, rows, processors))
                best = each;
        }
    // one tile uses only one group, which saves less than a second wave costs
    if (best && planes == 2 && units <= 64 && (blocks_of(*best, rows) - 1) / processors == 1)
        return std::nullopt;
    return best;
}

std::optional<WeightStationary> weight_stationary(const Chip &chip, const ProjectionSize &size,
                                                  const ProjectionPolicy &policy) {
    const bool many = size.T * size.N >= policy.stationary_rows &&
                      size.units() * size.padded() >= policy.stationary_weights;
    if (!many || !can_keep_weights(chip, size, policy)) return std::nullopt;
    return stationary_of(policy, size.planes);
}

std::optional<RealBlocks> choose_reals(const Chip &chip, const ProjectionSize &size,
                                       const ProjectionPolicy &policy) {
    if (policy.reals) return policy.reals;
    const int64_t units = size.units(), padded = size.padded();
    if (units * padded >= kStationaryWeights && weight_stationary(chip, size, policy))
        return std::nullopt;
    if (chip.arch == "sm_90a")
        if (const auto found = choose_warpgroups(units, size.rows(), padded, size.planes,
                                                 chip.processors(), policy))
            return *found;
    if (const auto found = choose_tiled(units, size.rows(), padded, size.planes, chip.processors(),
                                        chip.has_clusters()))
        return *found;
    return std::nullopt;
}

std::optional<Overlap> overlap_of(const Chip &chip, const ProjectionSize &size, const Form &form,
                                  const ProjectionPolicy &policy) {
    if (!policy.overlaps || size.T < policy.overlap_steps || size.shape.blocks == 1 ||
        !size.projects_bytes())
        return std::nullopt;
    const int64_t units = size.units(), rows = size.T * size.N;
    const bool large = rows * units >= policy.overlap_work && can_keep_weights(chip, size, policy);
    if (!large && !weight_stationary(chip, size, policy)) return std::nullopt;
    const WeightStationary &block = stationary_of(policy, size.planes);
    const int64_t free = chip.clusters.at(size.shape.blocks) - size.shape.tiles(size.N);
    Overlap found{block, size.shape.blocks, free, 0};
    // a tile must not cross time chunks
    for (const int64_t steps : {64, 32, 16, 8})
        if (steps * size.N % block.tile_rows() == 0) found.chunk = steps;
    if (!found.chunk || free <= 0 || !found.strips(units)) return std::nullopt;
    const double most =
        policy.overlap_share * static_cast<double>(size.T) * size.shape.step_time(form);
    if (found.time(units, rows, size.padded(), size.planes) >= most) return std::nullopt;
    return found;
}

Selection select_projection(const Chip &chip, const ProjectionSize &size, bool real_values,
                            const std::optional<Overlap> &overlap, const ProjectionPolicy &policy) {
    const int64_t rows = size.T * size.N;
    if (real_values && !overlap && policy.reads_reals && size.projects_bytes() && size.divides) {
        const auto blocks = rows > kFewestReals ? choose_reals(chip, size, policy) : std::nullopt;
        if (blocks) return {Projection::reals_tiled, blocks};
        if (rows <= kFewRows) return {Projection::reals_few};
    }
    if (rows <= kFewRows) return {Projection::codes_few};
    if (!size.projects_bytes())
        return {size.features < kMostSummed ? Projection::products : Projection::codes_few};
    if (overlap) return {Projection::bytes, {}, overlap->block};
    if (const auto found = weight_stationary(chip, size, policy))
        return {Projection::bytes, {}, *found};
    return {Projection::bytes,
            {},
            choose_tile(size.units(), size.rows(), size.planes, chip.processors())};
}

}  // namespace quant_gru::cuda
