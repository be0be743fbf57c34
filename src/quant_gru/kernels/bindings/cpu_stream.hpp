// Streams on the CPU: calls from Python that run one step.
#pragma once

#include <nanobind/nanobind.h>

namespace quant_gru {

void bind_stream(nanobind::module_ &m);

}  // namespace quant_gru
