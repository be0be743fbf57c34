// Builds the numbers of plans from Python dicts of addresses, numbers and names.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "cpu/core/cell_numbers.hpp"
#include "cpu/training/weights.hpp"

namespace quant_gru {

// Bits, whether codes are signed, scale, zero point.
using QuantizerTuple = std::tuple<int, bool, double, int64_t>;
QuantizerNumbers quantizer_numbers(const QuantizerTuple &tuple);

// From the dicts of plan_packing.py: all numbers, and those of the gate arithmetic.
CellNumbers cell_numbers(const nanobind::dict &numbers);
CellNumbers gate_part(const nanobind::dict &numbers);

// From the dict of requantize_weights.py.
WeightsPlan weights_plan(const nanobind::dict &numbers);

}  // namespace quant_gru
