// The layout of the persistent recurrence on a GPU. Estimates of times were measured on an H200.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/plans/cell_form.hpp"
#include "kernel_runtime/native/launch.hpp"

namespace quant_gru::cuda {

constexpr int64_t kMostShared = 227 << 10;  // bytes per block of GPUs with clusters

using Clusters = std::map<int, int>;  // blocks per cluster -> clusters that run at once

using kernel_runtime::cuda::Grid;
using kernel_runtime::cuda::Kernel;

// Environment variable with blocks,split,spread,rows of all recurrences; for experiments.
constexpr char kShapeVariable[] = "QUANT_GRU_CUDA_SHAPE";

struct RecurrenceShape {
    int64_t features;  // H padded, as the depth of the product with R
    int64_t units;     // H padded, as the number of units
    int blocks;        // per cluster
    int split;         // warps that split the features of 16 units: 1 or 2
    int spread;        // warps that repeat the product of 16 units and divide its rows: 1 or 2
    int rows;          // per tile: 1, 2, 4, 8 or 16; a tile of 16 rows has two alternating strips

    int64_t threads() const { return units / blocks / 16 * split * spread * 32; }
    int strip() const { return rows < 8 ? rows : 8; }
    int elements() const;  // per thread and strip
    int64_t tiles(int64_t N) const { return (N + rows - 1) / rows; }
    int64_t strips(int64_t N) const { return tiles(N) * rows / strip(); }

    bool operator==(const RecurrenceShape &o) const {
        return std::tie(features, units, blocks, split, spread, rows) ==
               std::tie(o.features, o.units, o.blocks, o.split, o.spread, o.rows);
    }

    // The size of the input projection in 32-bit words.
    int64_t projected_words(const Form &form, int64_t T, int64_t N) const {
        return T * strips(N) * units * strip() * (form.wide_input ? 2 : 1);
    }
    int64_t shared_bytes(const Form &form) const;
    Macros macros(const Form &form, int64_t H, int directions) const;

    // Whether weights fit registers, and the rest shared memory.
    bool fits(const Form &form, bool clusters) const;

    // Products per weight.
    int64_t passes(const Form &form) const;

    // The estimated nanoseconds per step.
    double step_time(const Form &form) const;
    // Clusters that run at once, without and with shared multiprocessors.
    std::pair<int64_t, int64_t> resident(const Form &form, const Clusters &clusters) const;

    // The number of such turns for a number of tiles, longer ones counted more.
    double waves(const Form &form, int64_t tiles, const Clusters &clusters) const;

    // Whether a block sends its states of a strip in one bulk copy, if they are many.
    bool bulk(const Form &form) const;

    // Steps of W x in the ring buffer: being loaded or in use.
    int ring(const Form &form) const;

 private:
    int64_t weight_registers(const Form &form) const;
    int64_t spilled(const Form &form) const;
    bool light() const;
    bool tight(const Form &form) const;
    int64_t shared_with(int steps, const Form &form) const;
};

// H units with the required padding.
RecurrenceShape make_shape(int64_t H, int blocks, int split, int spread, int rows);

// The shapes that a GPU can run.
std::vector<RecurrenceShape> possible_shapes(const Form &form, int64_t H, const Clusters &clusters);

// The estimated nanoseconds per step of a launch with N rows in each direction.
double time_of(const RecurrenceShape &shape, const Form &form, int64_t N, int directions,
               const Clusters &clusters);

// The shape with the least estimated time, or nothing if weights do not fit registers. Throws
// std::invalid_argument if `kShapeVariable` names none.
std::optional<RecurrenceShape> choose_shape(const Form &form, int64_t H, int64_t N, int directions,
                                            const Clusters &clusters);

struct Layout {
    Kernel kernel;
    Grid grid;
};

// Which forms of every step's states a launch writes whose first and last states are real values.
struct StateOutputs {
    bool values, codes;
};

struct RecurrenceUse {
    std::optional<StateOutputs> states;  // nothing if all states are codes
    bool held = false;                   // some units keep their state in a step
    bool early = false;  // blocks may start while the previous launch ends, see `starts_early`
    int64_t chunk = 0;   // steps per time chunk of an overlapping projection; 0 without overlap
};

// The form of one launch for the directions of a layer; nothing if one is impossible, or if their
// forms differ and a launch for each takes less time.
std::optional<Form> shared_form(const std::vector<DirectionForm> &directions, int64_t H, int64_t N,
                                const Clusters &clusters);

// Whether each block of a launch gets a multiprocessor of its own.
bool starts_early(const RecurrenceShape &shape, int64_t N, int directions,
                  const Clusters &clusters);

Layout recurrence_layout(const RecurrenceShape &shape, const Form &form, int64_t H, int64_t N,
                         int directions, const RecurrenceUse &use);

}  // namespace quant_gru::cuda
