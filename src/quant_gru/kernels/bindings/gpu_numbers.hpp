// Launches as Python reads them.
#pragma once

#include <nanobind/nanobind.h>

#include "cuda/host/launches.hpp"

namespace quant_gru {

// Macros with numbers as such.
nanobind::dict dict_of(const cuda::Macros &macros);

// Blocks in x and y, threads, cluster, shared bytes, early, together.
nanobind::tuple grid_tuple(const cuda::Grid &grid);

// Source, function, macros, grid, arguments, fields with their memory and offset, the fields that
// describe x or None, and a product of the caller or None.
nanobind::tuple launch_tuple(const cuda::Launch &launch, const nanobind::dict &macros,
                             const nanobind::object &product = nanobind::none());

}  // namespace quant_gru
