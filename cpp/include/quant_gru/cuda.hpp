// Frozen GRUs on NVIDIA GPUs. All functions exist in every build of the library; without
// -DQUANT_GRU_CUDA=ON they throw DeviceError.
#pragma once

#include <stdexcept>

#include "quant_gru/export.h"

namespace quant_gru::cuda {

// The driver, NVRTC or a GPU is missing or fails. The message is
// "Expected <thing> to be <rule>, got <value>".
class QUANT_GRU_API DeviceError : public std::runtime_error {
 public:
    using std::runtime_error::runtime_error;
};

}  // namespace quant_gru::cuda
