#include "model_on_gpu.hpp"

#include <stdexcept>
#include <utility>
#include <vector>

#include "quant_gru/cuda.hpp"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 30;  // kernels count rows, with padding, in 32 bits

void require(bool holds, const std::string &rule, int64_t got) {
    if (!holds) throw ArgumentError("Expected " + rule + ", got " + std::to_string(got));
}

Address address_of(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

struct Call::State {
    NetworkCall call;
};

std::shared_ptr<Network> network_of(Device &device, FrozenGRU frozen) {
    const auto owner = std::make_shared<const FrozenGRU>(std::move(frozen));
    std::vector<CellInput> inputs;
    for (const FrozenCell &each : owner->cells) inputs.push_back({each.numbers, each.between});
    const Shape &shape = owner->shape;
    return std::make_shared<Network>(device, shape.input_size, shape.hidden_size, shape.directions,
                                     shape.batch_first, inputs, owner);
}

Call::Call(std::unique_ptr<State> state) : state_(std::move(state)) {}
Call::Call(Call &&) noexcept = default;
Call &Call::operator=(Call &&) noexcept = default;
Call::~Call() = default;

void Call::run(const float *x, float *y, const RunOptions &options) const {
    if (!x || !y) throw ArgumentError("Expected addresses of x and y, got null");
    GivenAddresses given{};
    const auto give = [&given](Block block, const void *pointer) {
        given[static_cast<size_t>(block)] = address_of(pointer);
    };
    give(Block::x, x);
    give(Block::h0, options.h0);
    give(Block::lengths, options.lengths);
    give(Block::y, y);
    give(Block::h_n, options.h_n);
    state_->call.run(given, options.stream);
}

std::string Call::description() const {
    std::string text;
    for (const Launch &each : state_->call.launches.all()) {
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
    return Model(network_of(Device::at(device), read_frozen(bytes, size)));
}

Model Model::load(const std::string &path, int device) {
    return from_file(path,
                     [&](const void *bytes, size_t size) { return load(bytes, size, device); });
}

const Shape &Model::shape() const {
    return static_cast<const FrozenGRU *>(network_->owner.get())->shape;
}

Call Model::prepare(int64_t T, int64_t N) const {
    require(T >= 1, "T to be at least 1", T);
    require(N >= 1, "N to be at least 1", N);
    require(T <= kMostRows && N <= kMostRows / T / 16 + 1, "T * N to be below 2^26", T);
    try {
        return Call(std::unique_ptr<Call::State>(new Call::State{{network_, T, N}}));
    } catch (const std::invalid_argument &error) {  // the environment names no shape
        throw ArgumentError(error.what());
    }
}

}  // namespace quant_gru::cuda
