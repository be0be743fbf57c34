// Cells whose arrays are tensors of Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/cell.hpp"

namespace quant_gru {

using TablePlaces =
    std::array<std::tuple<cuda::Address, cuda::Address, cuda::Address, cuda::Address>, 3>;
using TermNumbers = std::vector<std::pair<int64_t, int64_t>>;  // k and M of one term

// Gate arithmetic, form, C and H, bits of W and R, addresses of tables, sums, and an object whose
// methods return addresses of arrays, see cuda/forward/layer.py.
using CellTuple = std::tuple<nanobind::object, cuda::Form, std::array<int, 2>, std::array<int, 2>,
                             TablePlaces, TermNumbers, nanobind::object>;

std::unique_ptr<cuda::Cell> cell_of(const CellTuple &given);

}  // namespace quant_gru
