#pragma once

#include <nanobind/nanobind.h>

namespace quant_gru {

// The planning of launches on a GPU, which needs none.
void bind_gpu_plans(nanobind::module_ &m);

}  // namespace quant_gru
