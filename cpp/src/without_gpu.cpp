// The functions of cuda.hpp in builds without -DQUANT_GRU_CUDA=ON.
#include "quant_gru/cuda.hpp"

namespace quant_gru::cuda {
namespace {

[[noreturn]] void refuse() {
    throw DeviceError("Expected a library built with -DQUANT_GRU_CUDA=ON, got one without GPUs");
}

}  // namespace

struct Network {};
struct Call::State {};

Call::Call(Call &&) noexcept = default;
Call &Call::operator=(Call &&) noexcept = default;
Call::~Call() = default;
void Call::run(const float *, float *, const RunOptions &) const { refuse(); }
std::string Call::description() const { refuse(); }

Model Model::load(const std::string &, int) { refuse(); }
Model Model::load(const void *, size_t, int) { refuse(); }
const Shape &Model::shape() const { refuse(); }
Call Model::prepare(int64_t, int64_t) const { refuse(); }

}  // namespace quant_gru::cuda
