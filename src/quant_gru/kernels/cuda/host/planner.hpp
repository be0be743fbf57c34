// The layout of the persistent recurrence on a GPU. It follows the Python package's
// kernels/cuda/recurrence/planner.py, whose estimates were measured; both choose the same shapes.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cuda/host/cell_form.hpp"
#include "cuda/host/runtime.hpp"

namespace quant_gru::cuda {

constexpr int64_t kMostShared = 227 << 10;  // bytes per block of GPUs with clusters

using Clusters = std::map<int, int>;  // blocks per cluster -> clusters that run at once
using Macros = std::map<std::string, std::string>;

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

    // The size of the input projection in 32-bit words.
    int64_t projected_words(const Form &form, int64_t T, int64_t N) const {
        return T * strips(N) * units * strip() * (form.wide_input ? 2 : 1);
    }
    int64_t shared_bytes(const Form &form) const;
    Macros macros(const Form &form, int64_t H, int directions) const;

    // Whether weights fit registers, and the rest shared memory.
    bool fits(const Form &form, bool clusters) const;

    // The estimated nanoseconds per step.
    double step_time(const Form &form) const;
    double waves(const Form &form, int64_t tiles, const Clusters &clusters) const;

 private:
    int64_t weight_registers(const Form &form) const;
    int64_t passes(const Form &form) const;
    int64_t spilled(const Form &form) const;
    bool light() const;
    bool bulk(const Form &form) const;
    bool tight(const Form &form) const;
    int ring(const Form &form) const;
    int64_t shared_with(int steps, const Form &form) const;
};

// The shape with the least estimated time, or nothing if weights do not fit registers.
std::optional<RecurrenceShape> choose_shape(const Form &form, int64_t H, int64_t N, int directions,
                                            const Clusters &clusters);

struct Layout {
    Kernel kernel;
    Grid grid;
};

// The launch of a recurrence that writes real values of the states (`values`), their codes, or
// both. It waits for time chunks of `chunk` steps of an overlapping projection; 0 without overlap.
Layout recurrence_layout(const RecurrenceShape &shape, const Form &form, int64_t H, int64_t N,
                         int directions, bool values, bool codes, int64_t chunk,
                         const Clusters &clusters);

}  // namespace quant_gru::cuda
