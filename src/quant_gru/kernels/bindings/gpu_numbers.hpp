// Launches as Python reads them.
#pragma once

#include <nanobind/nanobind.h>

#include "cuda/host/plans/planner.hpp"

namespace quant_gru {

// Macros with numbers as such.
nanobind::dict dict_of(const cuda::Macros &macros);

// Blocks in x and y, threads, cluster, shared bytes, early.
nanobind::tuple grid_tuple(const cuda::Grid &grid);

}  // namespace quant_gru
