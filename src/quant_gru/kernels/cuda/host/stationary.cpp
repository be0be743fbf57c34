#include "cuda/host/stationary.hpp"

#include <algorithm>

namespace quant_gru::cuda {
namespace {

constexpr int64_t kStages = 4, kDepth = 64;
constexpr int64_t kRows = 8192, kWeights = 1 << 17;  // from which such blocks are faster
constexpr int64_t kFewestSteps = 64;                 // from which an overlap pays
constexpr int64_t kWork = 4'000'000;   // rows times units, if x would be read as real values
constexpr double kLargestShare = 0.9;  // of the recurrence's time

// Three groups of four warps of 16 units, and one block per multiprocessor.
struct Block {
    int planes;

    static constexpr int64_t kUnits = 64, kGroups = 3;
    int64_t columns() const { return planes == 1 ? 8 : 4; }
    int64_t shared_bytes(int64_t padded) const {
        const int64_t rings = kGroups * kStages * kDepth * 8 * columns() * planes;
        return rings + 3 * kUnits * ((padded + 31) / 32 * 32 + 16);
    }
    static int64_t across(int64_t units) { return (units + kUnits - 1) / kUnits; }
};

bool can_keep_weights(const Launches &to, const Cell &cell, const Projected &out) {
    const int64_t idle = (Block::kUnits - out.units % Block::kUnits) % Block::kUnits;
    // the kernel reads unpadded rows
    return Block{cell.x_planes()}.shared_bytes(cell.bytes().padded) <= kMostShared &&
           to.N % out.rows == 0 && 8 * idle <= out.units && to.network.device.clusters().size() > 1;
}

// The estimated nanoseconds of an overlapping projection.
double time_of(const Launches &to, const Cell &cell, const Projected &out, int64_t blocks) {
    const bool one = cell.x_planes() == 1;
    const double each = one ? 0.39 : 1.0, feature = one ? 0.00038 : 0.00085;
    return static_cast<double>(to.T * to.N * out.units) *
           (each + feature * static_cast<double>(cell.bytes().padded)) /
           static_cast<double>(blocks);
}

}  // namespace

bool keeps_weights(const Launches &to, const Cell &cell, const Projected &out) {
    return to.T * to.N >= kRows && out.units * cell.bytes().padded >= kWeights &&
           can_keep_weights(to, cell, out);
}

std::optional<Overlap> overlap_of(const Launches &to, const Cell &cell, const Projected &out,
                                  const RecurrenceShape &shape) {
    if (to.T < kFewestSteps || shape.blocks == 1 || !cell.projects_bytes()) return std::nullopt;
    const bool large = to.T * to.N * out.units >= kWork && can_keep_weights(to, cell, out);
    if (!large && !keeps_weights(to, cell, out)) return std::nullopt;
    Overlap found{0, 0, shape.blocks, 0, 0};
    // a tile must not cross time chunks
    const int64_t tile_rows = 8 * Block{cell.x_planes()}.columns();
    for (const int64_t steps : {64, 32, 16, 8})
        if (steps * to.N % tile_rows == 0) found.chunk = steps;
    const int64_t clusters = to.network.device.clusters().at(shape.blocks) - shape.tiles(to.N);
    if (!found.chunk || clusters <= 0) return std::nullopt;
    // the most blocks that form whole clusters
    const int64_t across = Block::across(out.units);
    for (int64_t strips = shape.blocks * clusters / across; strips && !found.blocks; --strips)
        if (strips * across % shape.blocks == 0) found.blocks = strips * across;
    if (!found.blocks) return std::nullopt;
    // loads also check a counter after that of the last chunk
    found.counters = to.T / found.chunk + 2;
    const double most = kLargestShare * static_cast<double>(to.T) * shape.step_time(cell.form());
    if (time_of(to, cell, out, found.blocks) >= most) return std::nullopt;
    return found;
}

void project_stationary(Launches &to, const Cell &cell, const Projected &out, Address bytes,
                        const std::optional<Overlap> &overlap) {
    const Block block{cell.x_planes()};
    const int64_t rows = to.T * out.strips * out.strip, across = Block::across(out.units);
    const int64_t most =
        std::max<int64_t>(1, to.network.device.multiprocessors() / across) * Block::kGroups;
    ProjectPassingC p{};
    p.bytes = bytes;
    p.to = epilogue_of(to, cell, out);
    p.share = 8 * ((rows + 8 * most - 1) / (8 * most));
    const int64_t share = p.share * Block::kGroups;
    Kernel kernel{"projection/codes_weight_stationary", "project_passing", epilogue_macros(cell)};
    kernel.macros["UNIT_WARPS"] = kernel.macros["STAGES"] = "4";
    kernel.macros["GROUPS"] = "3";
    kernel.macros["COLUMNS"] = std::to_string(block.columns());
    kernel.macros["BLOCKS"] = "1";
    Grid grid;
    grid.x = static_cast<unsigned>(across * ((rows + share - 1) / share));
    grid.threads = 384;
    grid.shared_bytes = static_cast<unsigned>(block.shared_bytes(cell.bytes().padded));
    grid.early = true;  // it loads its weights while the codes are computed
    if (overlap) {
        grid.x = static_cast<unsigned>(overlap->blocks);
        grid.cluster = static_cast<unsigned>(overlap->cluster);
        p.counts = overlap->counts;
        p.stretch = overlap->chunk * to.N;
    }
    to.add(kernel, grid, p);
}

}  // namespace quant_gru::cuda
