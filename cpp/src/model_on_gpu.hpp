// The numbers of a file on a GPU.
#pragma once

#include <memory>

#include "cuda/host/call.hpp"
#include "frozen_file.hpp"

namespace quant_gru::cuda {

std::shared_ptr<Network> network_of(Device &device, FrozenGRU frozen);

}  // namespace quant_gru::cuda
