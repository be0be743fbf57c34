// Layers and directions that run at the same time.
#pragma once

#include <vector>

#include "cpu/core/layer.hpp"
#include "cpu/core/memory.hpp"

namespace quant_gru {

// A job of a layer.
struct Task {
    const Layer *layer;
    Job job;
};

// Runs tasks that do not depend on each other, split over at most `threads` threads where that
// pays. Returns whether an input was NaN.
bool run_tasks(const std::vector<Task> &tasks, int threads, Scratch &scratch);

}  // namespace quant_gru
