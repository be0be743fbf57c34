// What the runtime's half for GPUs asks of this library.
#include "kernel_runtime/native/embedder.hpp"
#include "quant_gru/cuda.hpp"

namespace kernel_runtime::cuda {

const Embedder kEmbedder{"quant-gru", "QUANT_GRU_CUDA_DRIVER", "QUANT_GRU_NVRTC",
                         "QUANT_GRU_CACHE"};

void fail(const std::string &message) { throw quant_gru::cuda::DeviceError(message); }

}  // namespace kernel_runtime::cuda
