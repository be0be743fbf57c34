// The CPU part of the Python module.
#pragma once

#include <nanobind/nanobind.h>

namespace quant_gru {

void bind_cpu(nanobind::module_ &m);
void bind_stream(nanobind::module_ &m);

}  // namespace quant_gru
