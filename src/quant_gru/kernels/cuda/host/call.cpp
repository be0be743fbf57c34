#include "cuda/host/call.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace quant_gru::cuda {
namespace {

constexpr size_t kMostArguments = 4096;

struct PaddingC {
    Address nan, lengths;
    int64_t T, N, stride;
};

struct ResultsC {
    Address from, to, lengths;
    int64_t T, N, features, step, next;
};

}  // namespace

Grid rows_grid(int64_t rows) {
    Grid grid;
    grid.x = static_cast<unsigned>((rows + 7) / 8);
    grid.threads = 256;
    return grid;
}

unsigned threads_for(int64_t work) {
    return static_cast<unsigned>(std::min<int64_t>(256, (work + 31) / 32 * 32));
}

Network::Network(Device &gpu, const NetworkShape &sizes, const std::vector<CellInput> &inputs,
                 std::shared_ptr<const void> owner_)
    : device(gpu), shape(sizes), owner(std::move(owner_)) {
    for (const CellInput &each : inputs) cells.push_back(std::make_unique<Cell>(device, each));
}

NetworkCall::NetworkCall(std::shared_ptr<Network> of, int64_t T, int64_t N)
    : network(std::move(of)) {
    Launches to(*network, *this, T, N);
    last_states = to.reserve(4 * static_cast<int64_t>(network->cells.size()) * N * to.H());
    to.start_results();
    if (!add_fast_layers(to)) add_general_layers(to);
    to.finish_results();
    std::vector<Kernel> kernels;
    for (const Launch &each : launches) kernels.push_back(each.kernel);
    network->device.compile(kernels);
    for (Launch &each : launches) each.function = network->device.load(each.kernel, each.grid);
}

void NetworkCall::run(GivenAddresses given, Stream stream) const {
    const auto place = [&given](Given each) -> Address & {
        return given[static_cast<size_t>(each)];
    };
    if (!place(Given::h_n)) place(Given::h_n) = last_states;
    const int32_t aligned = place(Given::x) % 16 == 0;
    alignas(16) unsigned char arguments[kMostArguments];
    for (const Launch &launch : launches) {
        if (launch.with_lengths && !place(Given::lengths)) continue;
        std::memcpy(arguments, launch.arguments.data(), launch.arguments.size());
        for (const Field &field : launch.fields) {
            const Address base = place(field.given);
            const Address address = base ? base + static_cast<Address>(field.offset) : 0;
            std::memcpy(arguments + field.at, &address, sizeof address);
        }
        if (launch.fours_at) std::memcpy(arguments + launch.fours_at, &aligned, sizeof aligned);
        network->device.launch(launch.function, launch.grid, arguments, stream);
    }
}

Address Launches::reserve(int64_t bytes) {
    call_.memory.emplace_back(network.device, static_cast<size_t>(bytes));
    return call_.memory.back().address();
}

SequenceC Launches::sequence_of(const Cell &cell) const {
    SequenceC s{};
    s.x_kind = kind_of(cell.numbers().x);
    s.h_kind = kind_of(cell.numbers().h);
    s.T = T;
    s.N = N;
    s.C = cell.C();
    s.H = cell.H();
    return s;
}

void Launches::clear_padding(Address nan) {
    PaddingC p{nan, 0, T, N, flag_stride()};
    Grid grid;
    grid.x = static_cast<unsigned>((T * N + 255) / 256);
    grid.threads = 256;
    add({"boundary/rows", "clear_padding", {}}, grid, p);
    point(place_of(p, p.lengths), Given::lengths);
    last().with_lengths = true;
}

void Launches::start_results() {
    if (batch_first() && T > 1 && N > 1) results_ = reserve(4 * T * N * width());
}

void Launches::point_results(size_t place, int64_t offset) {
    if (!results_) return point(place, Given::y, offset);
    const Address address = results_ + static_cast<Address>(offset);
    std::memcpy(last().arguments.data() + place, &address, sizeof address);
}

void Launches::finish_results() {
    ResultsC p{results_, 0, 0, T, N, width(), N * width(), width()};
    if (results_) {
        p.step = width();
        p.next = T * width();
    }
    add({"boundary/rows", "place_results", {}}, rows_grid(T * N), p);
    if (!results_) point(place_of(p, p.from), Given::y);
    point(place_of(p, p.to), Given::y);
    point(place_of(p, p.lengths), Given::lengths);
    last().with_lengths = !results_;
}

}  // namespace quant_gru::cuda
