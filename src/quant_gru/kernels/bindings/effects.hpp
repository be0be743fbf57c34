#pragma once

#include <nanobind/nanobind.h>

namespace quant_gru {

void bind_effects(nanobind::module_ &m);

}  // namespace quant_gru
