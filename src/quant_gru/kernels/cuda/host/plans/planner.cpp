#include "cuda/host/plans/planner.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

namespace quant_gru::cuda {
namespace {

constexpr int64_t kRegisters = 65536;  // per multiprocessor
constexpr int64_t kMostThreads = 512;
constexpr int64_t kFewest = 32;  // registers besides weights; with fewer, spills dominate
constexpr int64_t kMostWithoutClusters = 99 << 10;  // bytes of shared memory per block
constexpr int kRing = 4, kShortRing = 2;            // steps of W x that are being loaded or used
constexpr int64_t kFewWeights = 128, kManyWeights = 160;  // registers of weights
// Two blocks within these limits fit a multiprocessor, whatever their registers.
constexpr int64_t kLightThreads = 128, kLightShared = (kMostShared - 1024) / 2;
constexpr int64_t kAloneShared = kLightShared + 16;  // keeps a second block off a multiprocessor
constexpr double kSharedStep = 1.1;  // a step of two blocks on a multiprocessor, to that of one

int64_t rounded_up(int64_t v, int64_t unit) { return (v + unit - 1) / unit * unit; }

bool in_float(const Form &form) { return form.recurrence().in_float; }

// Bytes of states that a thread copies to the output at once; 0 if each thread stores its own.
int copied_bytes(const Form &form, int64_t H) {
    if (form.out_bytes != form.state_bytes) return 0;
    if (H * form.state_bytes % 16 == 0) return 16;
    return form.state_bytes == 1 && H % 4 == 0 ? 4 : 0;
}

constexpr std::pair<int, int> kWarps[] = {{1, 1}, {1, 2}, {2, 1}};  // split and spread
constexpr int kRows[] = {1, 2, 4, 8, 16};

bool is_possible(const RecurrenceShape &shape, const Form &form, const Clusters &clusters) {
    const bool doubles = form.weight_bytes == 1 && shape.split == 2 && shape.blocks > 1;
    return shape.rows >= shape.spread && (shape.rows <= 8 || doubles) &&
           shape.fits(form, clusters.size() > 1);
}

// The shape that `kShapeVariable` names.
RecurrenceShape named_shape(const std::string &wanted, const Form &form, int64_t H,
                            const Clusters &clusters) {
    const auto refuse = [&](const std::string &rule, const std::string &where = "") {
        throw std::invalid_argument("Expected " + std::string(kShapeVariable) + " to " + rule +
                                    ", got '" + wanted + "'" + where);
    };
    int n[4], end = -1;
    const bool read =
        std::sscanf(wanted.c_str(), "%d,%d,%d,%d%n", &n[0], &n[1], &n[2], &n[3], &end) == 4;
    if (!read || static_cast<size_t>(end) != wanted.size()) refuse("be blocks,split,spread,rows");
    const bool warps = std::count(std::begin(kWarps), std::end(kWarps), std::pair(n[1], n[2])) > 0;
    if (!clusters.count(n[0]) || !warps || !std::count(std::begin(kRows), std::end(kRows), n[3])) {
        std::string sizes;
        for (const auto &each : clusters)
            sizes += (sizes.empty() ? "" : ", ") + std::to_string(each.first);
        refuse("have " + sizes +
               " blocks (of this device), at most two warps in all and 1, 2, 4, 8 or 16 rows");
    }
    const RecurrenceShape shape = make_shape(H, n[0], n[1], n[2], n[3]);
    if (!is_possible(shape, form, clusters))
        refuse("be a shape whose weights fit registers", " for " + std::to_string(H) + " units");
    return shape;
}

}  // namespace

RecurrenceShape make_shape(int64_t H, int blocks, int split, int spread, int rows) {
    return {rounded_up(H, 64 * split), rounded_up(H, 16 * blocks), blocks, split, spread, rows};
}

int RecurrenceShape::elements() const { return std::max(1, strip() / 2 / (split * spread)); }

int64_t RecurrenceShape::weight_registers(const Form &form) const {
    return 12 * (features / 32) / split * form.weight_bytes;
}

bool RecurrenceShape::fits(const Form &form, bool clusters) const {
    const int64_t most = clusters || form.own ? kMostShared : kMostWithoutClusters;
    return threads() <= kMostThreads &&
           weight_registers(form) + kFewest <= std::min<int64_t>(255, kRegisters / threads()) &&
           shared_bytes(form) <= most;
}

int64_t RecurrenceShape::passes(const Form &form) const {
    // for few rows, one pass has both bytes as columns
    const bool packed = form.weight_bytes == 1 && strip() <= 4;
    return form.weight_bytes * (packed ? 1 : form.state_bytes);
}

int64_t RecurrenceShape::spilled(const Form &form) const {
    const int64_t allowed = std::min<int64_t>(255, kRegisters / threads());
    const bool lean = in_float(form) && passes(form) == 1 && elements() <= 2;
    const int64_t others = elements() == 1 ? 72 : elements() == 2 ? 88 : 112;
    const int64_t beside = lean ? 66 : others * (form.state_bytes + 1) / 2;
    return std::max<int64_t>(0, weight_registers(form) + beside - allowed);
}

bool RecurrenceShape::light() const { return threads() <= kLightThreads && blocks > 1; }

bool RecurrenceShape::bulk(const Form &form) const {
    const bool whole = features == units && units == 64 * blocks;
    return whole && (form.state_bytes == 2 || rows == 8) && blocks > 1 && form.weight_bytes == 1;
}

bool RecurrenceShape::tight(const Form &form) const {
    const bool narrow = in_float(form) && form.state_bytes + form.weight_bytes <= 3;
    return narrow && elements() > 1 && weight_registers(form) > kManyWeights;
}

int RecurrenceShape::ring(const Form &form) const {
    const bool crowded = shared_with(kRing, form) > kLightShared;
    return light() && crowded && shared_with(kShortRing, form) <= kLightShared ? kShortRing : kRing;
}

int64_t RecurrenceShape::shared_bytes(const Form &form) const {
    return shared_with(ring(form), form);
}

int64_t RecurrenceShape::shared_with(int steps, const Form &form) const {
    const bool is_bulk = bulk(form);
    const int64_t stride = is_bulk ? units : rounded_up(std::max(features, units), 128) + 64;
    const int64_t groups = units / blocks / 16, sets = form.state_bytes + form.weight_bytes - 1;
    const int64_t state = 2 * form.state_bytes * rows * stride;
    const int64_t exchange = split == 2 ? 4 * 2 * groups * 2 * sets * 3 * elements() * 32 : 0;
    const int64_t halves = split * spread, strips = rows / strip();
    const int64_t owned = std::max<int64_t>(1, strip() / halves);
    const bool receives = !is_bulk && blocks > 1;
    const int64_t received = receives ? 2 * groups * halves * form.state_bytes * owned * 16 : 0;
    // barriers, NaN flags of rows, and biases and multipliers
    const int64_t beside = 16 * strips + 32 + (tight(form) ? 12 * threads() : 0);
    const int64_t loaded = steps * strips * threads() * elements() * (form.wide_input ? 8 : 4);
    return state + exchange + received + beside + loaded + form.recurrence().table_bytes;
}

Macros RecurrenceShape::macros(const Form &form, int64_t H, int directions) const {
    const bool few = weight_registers(form) <= kFewWeights;
    // two accumulators per gate if a scheduler has one warp and registers allow
    const bool alone = threads() <= 128 && form.weight_bytes == 1 && passes(form) == 1;
    const std::map<std::string, int64_t> numbers{{"KP", features},
                                                 {"UP", units},
                                                 {"CL", blocks},
                                                 {"KS", split},
                                                 {"SPREAD", spread},
                                                 {"NB", strip()},
                                                 {"NT", rows / strip()},
                                                 {"HP", form.state_bytes},
                                                 {"WP", form.weight_bytes},
                                                 {"WX", form.wide_input ? 2 : 1},
                                                 {"OUT", form.out_bytes},
                                                 {"QG_WORDS", form.words},
                                                 {"QG_POT", form.powers && in_float(form)},
                                                 {"SATURATED", form.saturated && few},
                                                 {"TZ", form.recurrence().tables[0]},
                                                 {"TR", form.recurrence().tables[1]},
                                                 {"TG", form.recurrence().tables[2]},
                                                 {"COPY", copied_bytes(form, H)},
                                                 {"DIRS", directions},
                                                 {"RING", ring(form)},
                                                 {"BULK", bulk(form)},
                                                 {"LATE", in_float(form) && few},
                                                 {"SETS", alone && 64 < features && few ? 2 : 1},
                                                 {"TIGHT", tight(form)}};
    Macros found = form.products();
    found["REAL"] = in_float(form) ? "float" : "double";
    for (const auto &[name, value] : numbers) found[name] = std::to_string(value);
    return found;
}

std::pair<int64_t, int64_t> RecurrenceShape::resident(const Form &form,
                                                      const Clusters &clusters) const {
    const int64_t alone = std::max(clusters.at(blocks), 1);
    return {alone, light() && shared_bytes(form) <= kLightShared ? 2 * alone : alone};
}

double RecurrenceShape::waves(const Form &form, int64_t tiles, const Clusters &clusters) const {
    const auto [alone, most] = resident(form, clusters);
    const int64_t left = tiles % most;
    const double shared = most == alone ? 1.0 : kSharedStep;
    return static_cast<double>(tiles / most) * shared + (left == 0       ? 0.0
                                                         : left <= alone ? 1.0
                                                                         : shared);
}

double RecurrenceShape::step_time(const Form &form) const {
    const auto real = [](int64_t v) { return static_cast<double>(v); };
    const double busy = std::max(1.0, real(threads()) / 128);  // warps per scheduler
    const double steps = real(features) / 32 / split * real(passes(form));
    // products of a warp depend on each other, and warps share a tensor core
    double turn = steps * std::max(12.7, 9.7 * busy);
    double fixed = in_float(form) ? 239.0 : 398.0, each = in_float(form) ? 59.0 : 206.0;
    if (form.in_int32()) {
        fixed = 300.0;
        each = 80.0;
    }
    turn += fixed + each * elements() * std::pow(busy, 0.92);
    if (split == 2) turn += 47 + 4.6 * busy;
    const double spills = real(spilled(form));
    turn += 1.6 * spills + 0.05 * (spills * spills);
    double exchange = 0;
    if (blocks > 1) {
        const double kilobytes = real(units * strip() * form.state_bytes) / 1024;
        exchange = 77 + 2.3 * blocks + (72 + 2.8 * blocks) * std::min(kilobytes, 8.0);
        exchange += 45 * std::max(kilobytes - 8, 0.0);
    }
    // one strip's states are exchanged while the other strip is computed
    return std::max(turn + exchange, turn * (rows / strip()));
}

std::vector<RecurrenceShape> possible_shapes(const Form &form, int64_t H,
                                             const Clusters &clusters) {
    std::vector<RecurrenceShape> found;
    for (const auto &each : clusters) {
        const int blocks = each.first;
        if (blocks > 1 && H < 16 * blocks) continue;
        for (const auto &[split, spread] : kWarps)
            for (const int rows : kRows) {
                const RecurrenceShape shape = make_shape(H, blocks, split, spread, rows);
                if (is_possible(shape, form, clusters)) found.push_back(shape);
            }
    }
    return found;
}

double time_of(const RecurrenceShape &shape, const Form &form, int64_t N, int directions,
               const Clusters &clusters) {
    return shape.waves(form, shape.tiles(N) * directions, clusters) * shape.step_time(form);
}

std::optional<RecurrenceShape> choose_shape(const Form &form, int64_t H, int64_t N, int directions,
                                            const Clusters &clusters) {
    if (!form.narrow) return std::nullopt;
    const char *wanted = std::getenv(kShapeVariable);
    if (wanted && *wanted) return named_shape(wanted, form, H, clusters);
    std::optional<RecurrenceShape> best;
    double least = 0;
    for (const RecurrenceShape &shape : possible_shapes(form, H, clusters)) {
        const double time = time_of(shape, form, N, directions, clusters);
        if (best && time >= least) continue;
        best = shape;
        least = time;
    }
    return best;
}

std::optional<Form> shared_form(const std::vector<DirectionForm> &directions, int64_t H, int64_t N,
                                const Clusters &clusters) {
    const std::optional<Form> joint = joint_form(directions);
    if (!joint) return joint;
    const auto time = [&](const Form &form, int count) {
        const auto shape = choose_shape(form, H, N, count, clusters);
        return shape ? time_of(*shape, form, N, count, clusters) : INFINITY;
    };
    double alone = 0;
    bool alike = true;
    for (const DirectionForm &each : directions) alike = alike && each.form == *joint;
    if (alike) return joint;
    for (const DirectionForm &each : directions) alone += time(each.form, 1);
    if (time(*joint, static_cast<int>(directions.size())) > alone) return std::nullopt;
    return joint;
}

bool starts_early(const RecurrenceShape &shape, int64_t N, int directions,
                  const Clusters &clusters) {
    // some GPUs without clusters have too little shared memory
    return clusters.size() > 1 && shape.tiles(N) * directions <= clusters.at(shape.blocks);
}

Layout recurrence_layout(const RecurrenceShape &shape, const Form &form, int64_t H, int64_t N,
                         int directions, const RecurrenceUse &use) {
    Kernel kernel{"recurrence/persistent", "recurrent", shape.macros(form, H, directions)};
    if (use.held) {
        kernel.macros["HELD"] = "1";
        kernel.macros["QG_ZONEOUT"] = "0";
    }
    if (use.states) {
        kernel.macros["REALS"] = "1";
        kernel.macros["VALUES"] = std::to_string(use.states->values);
        kernel.macros["CODES"] = std::to_string(use.states->codes);
    }
    if (use.chunk) kernel.macros["STRETCH"] = std::to_string(use.chunk);
    Grid grid;
    grid.x = static_cast<unsigned>(shape.tiles(N) * shape.blocks);
    grid.y = static_cast<unsigned>(directions);
    grid.threads = static_cast<unsigned>(shape.threads());
    grid.cluster = static_cast<unsigned>(shape.blocks);
    grid.early = use.early;
    // keeps a second block off while other multiprocessors are busy
    const int64_t shared = shape.shared_bytes(form);
    grid.shared_bytes = static_cast<unsigned>(grid.early ? std::max(shared, kAloneShared) : shared);
    return {kernel, grid};
}

}  // namespace quant_gru::cuda
