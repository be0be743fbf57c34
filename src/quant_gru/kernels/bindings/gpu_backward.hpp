#pragma once

#include <nanobind/nanobind.h>

namespace quant_gru {

// The launches of backwards on a GPU, of which Python owns the arrays and the memory.
void bind_gpu_backward(nanobind::module_ &m);

}  // namespace quant_gru
