#include "cuda/host/plans/backward_shapes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace quant_gru::cuda {
namespace {

// recurrences in clusters
constexpr int64_t kRegisters = 65536;  // per multiprocessor
constexpr int64_t kMostThreads = 512;
constexpr int64_t kMostClusterShared = 220 << 10;
constexpr int64_t kBeside = 40;  // registers that a thread needs besides weights and sums

// recurrences over a whole GPU
constexpr int64_t kWarps = 8;
constexpr int64_t kThreadRegisters = 255;
constexpr int64_t kGridBeside = 74;  // registers besides weights, sums and gradients
constexpr int64_t kMostGridShared = 200 << 10;
constexpr int64_t kMostGridSharedAlone = 96 << 10;  // of GPUs without clusters
constexpr int64_t kAligned = 8;                     // units whose gradients a thread reads at once
constexpr double kStepByStep = 7.5;  // microseconds per step that is a product and a kernel

// derivatives of bytes
constexpr int64_t kDerivativeWarps = 12;  // for which a multiprocessor has registers
constexpr int64_t kStageRows = 32, kStages = 4, kStageDepth = 64;  // the ring of a group
constexpr int64_t kMostDerivativesShared = 222 << 10, kMostWithoutClusters = 98 << 10;
constexpr int64_t kMostRows = (int64_t{1} << 31) - (1 << 20);  // rows are counted in 32 bits

std::string given(const char *variable) {
    const char *found = std::getenv(variable);
    return found ? found : "";
}

void refuse(const char *variable, const std::string &rule, const std::string &wanted) {
    throw std::invalid_argument("Expected " + std::string(variable) + " to be " + rule + ", got '" +
                                wanted + "'");
}

// The integers of a variable, separated by commas. `names` says what they are.
template <size_t kCount>
std::array<int, kCount> numbers_in(const char *variable, const std::string &wanted,
                                   const std::string &names) {
    std::array<int, kCount> found{};
    const char *at = wanted.c_str();
    for (size_t i = 0; i < kCount; ++i) {
        int length = -1;
        const char *form = i + 1 < kCount ? "%d,%n" : "%d%n";
        if (std::sscanf(at, form, &found[i], &length) != 1 || length < 0)
            refuse(variable, names, wanted);
        at += length;
    }
    if (*at) refuse(variable, names, wanted);
    return found;
}

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

int64_t BackShape::depth() const { return ceil_div(3 * units, 32 * split) * 32 * split; }

int64_t BackShape::groups() const { return ceil_div(units * blocks, 16 * tiles); }

int64_t BackShape::elements() const { return ceil_div(units * rows, threads()); }

int64_t BackShape::weight_registers() const {
    return weight_planes * depth() / 16 / split * tiles * 4;
}

int64_t BackShape::shared_bytes() const {
    const int64_t row = ceil_div(2 * depth(), 128) * 128;
    const int64_t columns = std::max<int64_t>(rows, 2) * (packed() ? 2 : 4);
    const int64_t sums = 2 * blocks * split * units * columns;
    return (blocks > 1 ? 2 : 1) * planes * rows * row + sums + 16;
}

bool BackShape::fits() const {
    const int64_t allowed = std::min<int64_t>(255, kRegisters / threads() / 8 * 8);
    const int64_t beside = kBeside + 4 * tiles + 6 * elements();
    return threads() <= kMostThreads && elements() <= 8 && weight_registers() + beside <= allowed &&
           shared_bytes() <= kMostClusterShared;
}

double BackShape::step_time(double full) const {
    const auto real = [](int64_t value) { return static_cast<double>(value); };
    const int64_t warps = threads() / 32, steps = depth() / 16 / split;
    const int64_t products = steps * tiles * planes * weight_planes;
    // mma instructions of different warps compete for tensor cores; those of a warp form chains
    const double turns = 8.0 * real(products) * real(ceil_div(warps, 4));
    const int64_t chains = tiles >= 4 ? 1 : tiles > 1 ? 2 : 4;
    const double chain = 33.0 * real(products) / real(tiles * chains);
    const double read = real(warps * steps) / 2 * real(planes) * std::max(1.0, real(rows) / 2);
    const double each = real(elements()) * std::sqrt(real(planes));
    const double added = real(blocks * split * elements()), of_blocks = real(blocks);
    double alone = 204 + 0.452 * turns + 0.739 * read + 48 * each + 1.8 * added + 1.5 * of_blocks;
    // on a busy GPU, reads and writes cost more
    double beside = 97 + 0.264 * turns + 0.281 * chain + 1.329 * read + 164 * each + 1.1 * added;
    beside += 0.9 * of_blocks;
    if (blocks > 1) {
        const int64_t columns = std::max<int64_t>(rows, 2) * (packed() ? 2 : 4);
        const double kilobytes = real(units * blocks * split * columns) / 1024;
        alone += 25.2 * kilobytes + 15.6 * real(tiles);
        beside += 33.4 * kilobytes + 13 * real(tiles);
    }
    return alone + full * (beside - alone);
}

TransposedLayout BackShape::layout() const {
    const int64_t count = weight_registers() * threads() * blocks;
    return {units, blocks, tiles, split, depth(), weight_planes, groups(), count};
}

Macros BackShape::macros(bool half, int operand, int directions) const {
    return {{"U", text(units)},   {"CL", text(blocks)},       {"MT", text(tiles)},
            {"KS", text(split)},  {"KP", text(depth())},      {"WP", text(weight_planes)},
            {"NB", text(rows)},   {"PL", text(planes)},       {"PACK", text(packed())},
            {"HALF", text(half)}, {"OPERAND", text(operand)}, {"DIRS", text(directions)}};
}

std::vector<BackShape> possible_back_shapes(int64_t H, int64_t planes, int64_t weight_planes,
                                            const Clusters &clusters) {
    std::vector<BackShape> found;
    for (const auto &[blocks, resident] : clusters) {
        const int64_t units = ceil_div(H, 8 * blocks) * 8;
        if (blocks > 1 && units * (blocks - 1) >= H) continue;
        for (const int tiles : {1, 2, 3, 4})
            for (const int split : {1, 2, 4})
                for (const int rows : {1, 2, 4, 8}) {
                    const BackShape shape{units, blocks, tiles, split, rows, planes, weight_planes};
                    if (shape.fits()) found.push_back(shape);
                }
    }
    return found;
}

std::optional<BackShape> choose_back_shape(int64_t H, int64_t N, int64_t directions, int64_t planes,
                                           int64_t weight_planes, const Clusters &clusters) {
    const auto shapes = possible_back_shapes(H, planes, weight_planes, clusters);
    const std::string wanted = given(kBackVariable);
    if (!wanted.empty()) {
        const auto [blocks, tiles, split, rows] =
            numbers_in<4>(kBackVariable, wanted, "blocks,tiles,split,rows");
        for (const BackShape &shape : shapes)
            if (shape.blocks == blocks && shape.tiles == tiles && shape.split == split &&
                shape.rows == rows)
                return shape;
        refuse(kBackVariable,
               "a shape that this device can run for " + std::to_string(H) + " units", wanted);
    }
    std::optional<BackShape> best;
    double least = 0;
    for (const BackShape &shape : shapes) {
        const int64_t tiles = ceil_div(N, shape.rows) * directions;
        const int64_t at_once = std::max(clusters.at(static_cast<int>(shape.blocks)), 1);
        const double full =
            std::min(1.0, static_cast<double>(tiles) / static_cast<double>(at_once));
        const double time = static_cast<double>(ceil_div(tiles, at_once)) * shape.step_time(full);
        if (best && time >= least) continue;
        best = shape;
        least = time;
    }
    return best;
}

int64_t BackGridShape::loads() const {
    return ceil_div(3 * H, 32 * warps * blocks * chunk) * chunk;
}

int64_t BackGridShape::groups() const { return ceil_div(H, 16 * tiles); }

int64_t BackGridShape::registers() const {
    const int64_t held = (loads() - parked) * tiles * 8;
    const int64_t read = std::min(1 + ahead, loads() / chunk) * chunk * columns * 4;
    const int64_t elements = ceil_div(pairs(), blocks * threads());
    return held + tiles * columns * 4 + read + kGridBeside + 20 * (elements - 1);
}

int64_t BackGridShape::shared_bytes() const {
    const int64_t weights = parked * tiles * 32 * threads();
    const int64_t sums = 2 * warps * rows() * (16 * tiles + 4) * 4;
    return weights + sums + (blocks > 1 ? 2 * pairs() * 8 : 0) + 16;
}

int64_t BackGridShape::clusters(int64_t N) const { return groups() * ceil_div(N, rows()); }

double BackGridShape::step_time(int64_t N) const {
    const auto real = [](int64_t value) { return static_cast<double>(value); };
    const int64_t depth = 32 * loads() * warps;
    const double per_us = 1900.0;  // cycles
    double read = real(clusters(N) * blocks * std::min(N, rows()) * depth * 2) / 5.6e6;
    read = std::max(read, real(rows() * depth * 2) / 48 / per_us);
    const double multiplied = real(2 * loads() * warps * tiles * columns) / 4 * 6.2 / per_us;
    const double loaded = real(parked * tiles * 32 * threads()) / 128 / per_us;
    const double added = real(2 * warps * pairs() * 8) / 128 / per_us;
    const double exchanged = blocks > 1 ? 0.2 + 0.05 * real(blocks) : 0.0;
    const double of_weights = multiplied + loaded / 2;
    const double longest = std::max(read, of_weights), other = std::min(read, of_weights);
    return 0.75 + longest + 0.25 * other + added + exchanged + 0.1 * (real(pairs()) / 256);
}

TransposedLayout BackGridShape::layout() const {
    const int64_t parts = blocks * warps;
    const int64_t count = groups() * blocks * threads() * loads() * tiles * 8;
    return {H, 1, tiles, parts, 32 * loads() * parts, 1, groups(), count};
}

Macros BackGridShape::macros(bool half) const {
    return {{"CL", text(blocks)},
            {"MT", text(tiles)},
            {"NT", text(columns)},
            {"WARPS", text(warps)},
            {"LOADS", text(loads())},
            {"PARKED", text(parked)},
            {"CHUNK", text(chunk)},
            {"AHEAD", text(ahead)},
            {"HALF", text(half)},
            {"OPERAND", "0"},
            {"DIRS", "1"}};
}

std::vector<BackGridShape> possible_back_grids(int64_t H, int64_t N, const Clusters &clusters) {
    std::vector<BackGridShape> found;
    const int64_t most = clusters.size() > 1 ? kMostGridShared : kMostGridSharedAlone;
    // few loads per check, so that waiting is short, but enough loads in flight
    const auto add = [&](int64_t blocks, int64_t resident, int64_t tiles, int64_t columns,
                         int64_t chunk) {
        for (const int64_t ahead : {2, 1}) {
            BackGridShape shape{H, blocks, tiles, columns, kWarps, 0, chunk, ahead};
            if (shape.clusters(N) > resident) return;
            shape.parked =
                std::max<int64_t>(0, ceil_div(shape.registers() - kThreadRegisters, 8 * tiles));
            if (shape.parked <= shape.loads() && shape.shared_bytes() <= most) {
                found.push_back(shape);
                return;
            }
        }
    };
    for (const auto &[blocks, resident] : clusters)
        for (int64_t tiles = 1; blocks <= 8 && tiles <= 8; ++tiles)
            for (const int64_t columns : {1, 2, 3, 4, 6, 8})
                for (int64_t chunk = 1; chunk <= 6; ++chunk)
                    if (chunk * columns >= 4 && chunk * columns <= 8)
                        add(blocks, resident, tiles, columns, chunk);
    return found;
}

bool wants_back_grid() {
    const std::string wanted = given(kBackGridVariable);
    return !wanted.empty() && wanted != "none";
}

std::optional<BackGridShape> choose_back_grid(int64_t H, int64_t N, const Clusters &clusters) {
    const std::string wanted = given(kBackGridVariable);
    if (wanted == "none") return {};
    if (!wanted.empty()) {
        const std::string names = "blocks,tiles,columns,warps,parked,chunk,ahead";
        const auto [blocks, tiles, columns, warps, parked, chunk, ahead] =
            numbers_in<7>(kBackGridVariable, wanted, names + " or none");
        const auto of = clusters.find(blocks);
        if (H % kAligned == 0 && of != clusters.end() &&
            std::min({tiles, columns, warps, chunk}) > 0) {
            const BackGridShape shape{H, blocks, tiles, columns, warps, parked, chunk, ahead};
            if (shape.clusters(N) <= of->second && parked >= 0 && parked <= shape.loads() &&
                ahead >= 0 && shape.pairs() % blocks == 0 &&
                shape.shared_bytes() <= kMostGridShared)
                return shape;
        }
        refuse(kBackGridVariable,
               "a shape that this device can run for " + std::to_string(H) + " units and " +
                   std::to_string(N) + " rows",
               wanted);
    }
    std::optional<BackGridShape> best;
    if (H % kAligned) return best;
    double least = kStepByStep;
    for (const BackGridShape &shape : possible_back_grids(H, N, clusters)) {
        const double time = shape.step_time(N);
        if (time >= least) continue;
        best = shape;
        least = time;
    }
    return best;
}

int64_t DerivativesShape::shared_bytes() const {
    const auto line = [](int64_t features) { return ceil_div(features, 32) * 32 + 16; };
    const int64_t rings = groups * kStages * kStageRows * kStageDepth;
    const int64_t lines = line(padded.first) + line(padded.second);
    return ceil_div(table_bytes, 128) * 128 + rings + 48 * unit_warps * lines;
}

Macros DerivativesShape::macros() const {
    return {{"UNIT_WARPS", text(unit_warps)}, {"GROUPS", text(groups)}};
}

std::pair<Grid, int64_t> DerivativesShape::grid(int64_t H, int64_t rows, int64_t directions,
                                                int64_t processors) const {
    const int64_t across = ceil_div(H, 16 * unit_warps);
    const int64_t at_once = processors * std::max<int64_t>(1, kDerivativeWarps * 32 / threads());
    const int64_t most = std::max<int64_t>(1, at_once / (across * directions));
    const int64_t share = 8 * ceil_div(rows, 8 * most * groups);
    Grid grid;
    grid.x = static_cast<unsigned>(across * ceil_div(rows, share * groups));
    grid.y = static_cast<unsigned>(directions);
    grid.threads = static_cast<unsigned>(threads());
    grid.shared_bytes = static_cast<unsigned>(shared_bytes());
    return {grid, share};
}

std::optional<DerivativesShape> choose_derivatives(int64_t H, int64_t rows,
                                                   std::pair<int64_t, int64_t> padded,
                                                   int64_t table_bytes, bool clusters) {
    if (rows > kMostRows) return {};
    const int64_t limit = clusters ? kMostDerivativesShared : kMostWithoutClusters;
    const int64_t tiles = ceil_div(H, 16);
    constexpr std::pair<int, int> kShapes[] = {{2, 4}, {2, 3}, {1, 6}};
    for (const auto &[unit_warps, groups] : kShapes) {
        const DerivativesShape shape{unit_warps, groups, padded, table_bytes};
        const int64_t idle = ceil_div(tiles, unit_warps) * unit_warps - tiles;
        if (shape.shared_bytes() <= limit && 4 * idle <= tiles) return shape;
    }
    return {};
}

}  // namespace quant_gru::cuda
