// Calls of a GRU on a GPU whose memory this library owns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/host/launches.hpp"
#include "cuda/host/uploaded_cell.hpp"

namespace quant_gru::cuda {

// A model's layers on a GPU.
struct Network {
    // `inputs`: the directions of a layer are adjacent. `owner` keeps their arrays.
    Network(Device &gpu, int64_t C, int64_t H, int64_t directions, bool batch_first,
            const std::vector<CellInput> &inputs, std::shared_ptr<const void> owner);

    Device &device;
    const bool batch_first;  // x and y
    std::shared_ptr<const void> owner;
    Layers layers;
};

// Launches whose kernels are loaded.
class LoadedLaunches {
 public:
    LoadedLaunches() = default;
    // Compiles kernels in parallel.
    LoadedLaunches(Device &device, std::vector<Launch> launches);

    const std::vector<Launch> &all() const { return all_; }

    // Starts one of them. `given` has an address for each block, 0 for what is not given.
    void start(size_t index, const Address *given, cuda::Stream stream) const;

 private:
    Device *device_ = nullptr;
    std::vector<Launch> all_;
    std::vector<Function> functions_;
};

// Addresses of a caller, by `Block`.
using GivenAddresses = std::array<Address, kBlockCount>;

// A call with its workspace.
struct NetworkCall {
    // T and N are at least 1, and T * N is below 2^26.
    NetworkCall(std::shared_ptr<Network> of, int64_t T, int64_t N);

    // Starts the launches. x and y are given.
    void run(GivenAddresses given, cuda::Stream stream) const;

    std::shared_ptr<Network> network;
    Memory space;
    LoadedLaunches launches;
    Address last_states = 0;  // where they go if the caller does not want them
};

}  // namespace quant_gru::cuda
