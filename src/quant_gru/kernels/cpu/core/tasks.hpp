// Jobs of layers and directions that run concurrently.
#pragma once

#include <vector>

#include "cpu/core/layer.hpp"
#include "cpu/core/memory.hpp"

namespace quant_gru {

struct Task {
    const Layer *layer;
    Job job;
};

// Runs independent tasks, split over at most `threads` threads if there is enough work. Returns
// whether an input was NaN.
bool run_tasks(const std::vector<Task> &tasks, int threads, Scratch &scratch);

}  // namespace quant_gru
