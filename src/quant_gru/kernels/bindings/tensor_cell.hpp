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

// The numbers of a layer and direction, and the arrays of its weights.
struct CellArrays {
    nanobind::object owner;  // of the gate arithmetic
    std::shared_ptr<const cuda::GateNumbers> gates;
    cuda::Form form;
    std::array<cuda::TableAddresses, 3> places;
    CellNumbers numbers;
    cuda::DerivedArrays derived;
};

using TermNumbers = std::vector<std::pair<int64_t, int64_t>>;  // k and M of one term

// The CellArrays, sums that requantize the layer below, and the address of whether weights are
// finite.
using CellTuple = std::tuple<nanobind::object, TermNumbers, cuda::Address>;

std::unique_ptr<cuda::Cell> cell_of(const CellTuple &given);

void bind_cell_arrays(nanobind::module_ &m);

}  // namespace quant_gru
