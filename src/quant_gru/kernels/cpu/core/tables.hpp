// Tables in the forms that kernels read fast.
#pragma once

#include "cpu/core/memory.hpp"
#include "cpu/core/plan.hpp"

namespace quant_gru {

// Copies the segments of a table whose bounds and coefficients belong to the caller.
void copy_segments(Table &t, Arena &arena);

// Adds entries, bytes or words: the outputs of all input codes. `pre` is the sum that is looked up.
void tabulate(Table &t, const Sum &pre, Arena &arena);

}  // namespace quant_gru
