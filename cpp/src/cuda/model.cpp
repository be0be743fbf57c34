#include <utility>

#include "cuda/call.hpp"
#include "quant_gru/cuda.hpp"

namespace quant_gru::cuda {

Call::Call(std::unique_ptr<State> state) : state_(std::move(state)) {}
Call::Call(Call &&) noexcept = default;
Call &Call::operator=(Call &&) noexcept = default;
Call::~Call() = default;

void Call::run(const float *x, float *y, const RunOptions &options) const {
    state_->run(x, y, options);
}

std::string Call::description() const {
    std::string text;
    for (const Launch &each : state_->launches) {
        text += each.kernel.source + " " + each.kernel.function + " grid " +
                std::to_string(each.grid.x) + "x" + std::to_string(each.grid.y) + " threads " +
                std::to_string(each.grid.threads) + " cluster " +
                std::to_string(each.grid.cluster) + " shared " +
                std::to_string(each.grid.shared_bytes) + (each.grid.early ? " early" : "") +
                (each.with_lengths ? " with lengths" : "");
        for (const auto &[name, value] : each.kernel.macros) text += " " + name + "=" + value;
        text += "\n";
    }
    return text;
}

Model::Model(std::shared_ptr<Network> network) : network_(std::move(network)) {}

Model Model::load(const void *bytes, size_t size, int device) {
    FrozenGRU frozen = read_frozen(bytes, size);
    const QuantizerNumbers &x = frozen.cells[0].numbers.x;
    if (x.zero != x.inner().zero)
        throw FileError("Expected the zero point of input.x to be a code on a GPU, got " +
                        std::to_string(x.zero) + " (input_excludes_zero); use quant_gru::Model");
    return Model(std::make_shared<Network>(Device::at(device), std::move(frozen)));
}

Model Model::load(const std::string &path, int device) {
    return from_file(path,
                     [&](const void *bytes, size_t size) { return load(bytes, size, device); });
}

const Shape &Model::shape() const { return network_->frozen.shape; }

Call Model::prepare(int64_t T, int64_t N) const {
    return Call(std::make_unique<Call::State>(network_, T, N));
}

}  // namespace quant_gru::cuda
