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

// Addresses of a caller, by `Block`; 0 for what is not given.
using GivenAddresses = std::array<Address, kBlockCount>;

// A call with its workspace.
struct NetworkCall {
    // T and N are at least 1, and T * N is below 2^26.
    NetworkCall(std::shared_ptr<Network> of, int64_t T, int64_t N);

    // Starts the launches. x and y are given.
    void run(GivenAddresses given, Stream stream) const;

    std::shared_ptr<Network> network;
    Memory space;
    std::vector<Launch> launches;
    std::vector<Function> functions;  // of the launches
    Address last_states = 0;          // where they go if the caller does not want them
};

}  // namespace quant_gru::cuda
