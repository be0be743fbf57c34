// Input projections by blocks that keep their weights in shared memory, and their overlap with the
// recurrence. Both follow the Python package: from_codes.py and overlap.py in
// kernels/cuda/projection.
#pragma once

#include <optional>

#include "cuda/host/projections.hpp"

namespace quant_gru::cuda {

// A projection that runs at the same time as the recurrence, on the clusters that it leaves free.
// The recurrence waits for time chunks, whose finished rows are counted.
struct Overlap {
    int64_t chunk;   // steps per time chunk
    int64_t blocks;  // of the projection
    int cluster;     // blocks per cluster, as in the recurrence
    int64_t counters;
    Address counts = 0;
};

// Whether such blocks are faster than tiles.
bool keeps_weights(const Launches &to, const Cell &cell, const Projected &out);

// The overlap of a direction's projection with its recurrence, without `counts`; nothing if it does
// not pay.
std::optional<Overlap> overlap_of(const Launches &to, const Cell &cell, const Projected &out,
                                  const RecurrenceShape &shape);

// From codes as bytes. Only if `keeps_weights`, or with an overlap.
void project_stationary(Launches &to, const Cell &cell, const Projected &out, Address bytes,
                        const std::optional<Overlap> &overlap);

}  // namespace quant_gru::cuda
