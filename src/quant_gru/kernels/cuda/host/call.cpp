#include "cuda/host/call.hpp"

#include <cstring>
#include <utility>

namespace quant_gru::cuda {
namespace {

constexpr size_t kMostArguments = 4096;

template <class Value>
void write(unsigned char *arguments, size_t at, const Value &value) {
    std::memcpy(arguments + at, &value, sizeof value);
}

}  // namespace

Network::Network(Device &gpu, int64_t C, int64_t H, int64_t directions, bool first,
                 const std::vector<CellInput> &inputs, std::shared_ptr<const void> owner_)
    : device(gpu),
      batch_first(first),
      owner(std::move(owner_)),
      layers{C, H, directions, {gpu.arch(), gpu.clusters()}, {}} {
    for (const CellInput &each : inputs)
        layers.cells.push_back(std::make_unique<UploadedCell>(device, each));
}

LoadedLaunches::LoadedLaunches(Device &device, std::vector<Launch> launches)
    : device_(&device), all_(std::move(launches)) {
    std::vector<Kernel> kernels;
    for (const Launch &each : all_) kernels.push_back(each.kernel);
    device.compile(kernels);
    for (const Launch &each : all_) functions_.push_back(device.load(each.kernel, each.grid));
}

void LoadedLaunches::start(size_t index, const Address *given, cuda::Stream stream) const {
    const Launch &launch = all_[index];
    const auto place = [given](Block each) { return given[static_cast<size_t>(each)]; };
    if (launch.with_lengths && !place(Block::lengths)) return;
    alignas(16) unsigned char arguments[kMostArguments];
    std::memcpy(arguments, launch.arguments.data(), launch.arguments.size());
    for (const Field &field : launch.fields) {
        const Address base = place(field.place.block);
        const Address address = base ? base + static_cast<Address>(field.place.offset) : 0;
        write(arguments, field.at, address);
    }
    if (launch.input && launch.input->fours) {
        const int32_t aligned = place(Block::x) % 16 == 0;
        write(arguments, launch.input->fours, aligned);
    }
    device_->launch(functions_[index], launch.grid, arguments, stream);
}

NetworkCall::NetworkCall(std::shared_ptr<Network> of, int64_t T, int64_t N)
    : network(std::move(of)) {
    CallForm form;
    form.batch_first = network->batch_first;
    form.has_padding = form.own_products = true;
    Launches fast(network->layers, form, T, N), general(network->layers, form, T, N);
    const bool is_fast = fast.add_fast();
    if (!is_fast) general.add_general();
    Launches &made = is_fast ? fast : general;
    const auto states = static_cast<int64_t>(network->layers.cells.size());
    const Place last = made.reserve(4 * states * N * made.H());
    space = Memory(network->device, static_cast<size_t>(made.space));
    last_states = space.address() + static_cast<Address>(last.offset);
    const int64_t C = made.C(), step = form.batch_first ? C : N * C,
                  next = form.batch_first ? T * C : C;
    for (Launch &each : made.all) {
        if (!each.input) continue;
        write(each.arguments.data(), each.input->step, step);
        write(each.arguments.data(), each.input->next, next);
        if (C % 4) each.input->fours = 0;
    }
    launches = LoadedLaunches(network->device, std::move(made.all));
}

void NetworkCall::run(GivenAddresses given, cuda::Stream stream) const {
    const auto place = [&given](Block each) -> Address & {
        return given[static_cast<size_t>(each)];
    };
    if (!place(Block::h_n)) place(Block::h_n) = last_states;
    place(Block::space) = space.address();
    for (size_t i = 0; i < launches.all().size(); ++i) launches.start(i, given.data(), stream);
}

}  // namespace quant_gru::cuda
