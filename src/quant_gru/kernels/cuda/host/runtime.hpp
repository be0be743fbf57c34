// The driver, kernels and launches of the runtime under the names of this package.
#pragma once

#include "kernel_runtime/native/device.hpp"

namespace quant_gru::cuda {

using namespace kernel_runtime::cuda;

}  // namespace quant_gru::cuda
