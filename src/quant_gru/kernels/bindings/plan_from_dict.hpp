// Builds native plans from Python dicts of addresses, numbers and names.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/core/plan.hpp"
#include "cpu/core/weights.hpp"

namespace quant_gru {

// From the dict of plan_packing.py.
LayerPlan layer_plan(const nanobind::dict &numbers);

// From the dict of requantize_weights.py.
WeightsPlan weights_plan(const nanobind::dict &numbers);

}  // namespace quant_gru
