// Plans of native code from the dicts of Python: addresses, numbers and names.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/core/plan.hpp"
#include "cpu/core/weights.hpp"

namespace quant_gru {

// The numbers of executor.py.
LayerPlan layer_plan(const nanobind::dict &numbers);

// The numbers of requantize_weights.py.
WeightsPlan weights_plan(const nanobind::dict &numbers);

}  // namespace quant_gru
