// The launches of a call with T steps of N sequences, prepared once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/host/cell.hpp"
#include "cuda/host/plans/projection.hpp"
#include "cuda/host/runtime.hpp"

namespace quant_gru::cuda {

// What a caller passes to a call.
enum class Given : int { x, h0, y, h_n, lengths };
constexpr size_t kGivenCount = 5;

// A field of arguments that has an address of the caller.
struct Field {
    size_t at;  // in the arguments
    Given given;
    int64_t offset;  // in bytes
};

struct Launch {
    Kernel kernel;
    Grid grid;
    std::vector<unsigned char> arguments;
    std::vector<Field> fields;
    size_t fours_at = 0;        // an int32 that says whether x is aligned to 16 bytes, or 0
    bool with_lengths = false;  // only started if there are lengths
    Function function{};
};

struct NetworkShape {
    int64_t C, H, directions;
    bool batch_first;  // of x and y
};

// A model's layers on a GPU.
struct Network {
    // `inputs`: the directions of a layer are adjacent. `owner` keeps their arrays.
    Network(Device &gpu, const NetworkShape &sizes, const std::vector<CellInput> &inputs,
            std::shared_ptr<const void> owner);

    Device &device;
    const NetworkShape shape;
    std::shared_ptr<const void> owner;
    std::vector<std::unique_ptr<Cell>> cells;

    size_t layers() const { return cells.size() / directions(); }
    size_t directions() const { return static_cast<size_t>(shape.directions); }
    Cell &cell(size_t layer, size_t direction) const {
        return *cells[layer * directions() + direction];
    }
};

// Addresses of a caller, by `Given`; 0 for what is not given.
using GivenAddresses = std::array<Address, kGivenCount>;

// A call with its workspace.
struct NetworkCall {
    // T and N are at least 1, and T * N is below 2^26.
    NetworkCall(std::shared_ptr<Network> of, int64_t T, int64_t N);

    // Starts the launches. x and y are given.
    void run(GivenAddresses given, Stream stream) const;

    std::shared_ptr<Network> network;
    std::vector<Memory> memory;  // the workspace
    std::vector<Launch> launches;
    Address last_states = 0;  // where they go if the caller does not want them
};

// Gathers the launches of a call and reserves its workspace.
class Launches {
 public:
    Launches(Network &network, NetworkCall &call, int64_t T, int64_t N)
        : network(network), T(T), N(N), call_(call) {}

    Network &network;
    const int64_t T, N;

    // Memory of the workspace.
    Address reserve(int64_t bytes);

    // Adds a launch. `point` and `last` complete its arguments.
    template <class Arguments>
    void add(Kernel kernel, const Grid &grid, const Arguments &arguments) {
        const auto *from = reinterpret_cast<const unsigned char *>(&arguments);
        Launch &launch = call_.launches.emplace_back();
        launch.kernel = std::move(kernel);
        launch.grid = grid;
        launch.arguments.assign(from, from + sizeof arguments);
    }

    // Makes a field of the last launch hold an address of the caller. `place`: offset of the field.
    void point(size_t place, Given given, int64_t offset = 0) {
        call_.launches.back().fields.push_back({place, given, offset});
    }
    Launch &last() { return call_.launches.back(); }

    Chip chip() const { return {network.device.arch(), network.device.clusters()}; }

    // The strides of steps and sequences in x, in values.
    int64_t x_step() const { return batch_first() ? C() : N * C(); }
    int64_t x_next() const { return batch_first() ? T * C() : C(); }
    int64_t width() const { return network.shape.directions * H(); }
    int64_t H() const { return network.shape.H; }
    int64_t C() const { return network.shape.C; }
    bool batch_first() const { return network.shape.batch_first; }

    // Bytes of NaN flags per sequence.
    int64_t flag_stride() const { return (T + 3) / 4 * 4; }

    // The sizes and containers of a cell.
    SequenceC sequence_of(const Cell &cell) const;

    // Adds the split of codes (count, features) in their container into bytes (planes, count,
    // padded).
    void split_codes(const QuantizerNumbers &q, Address codes, int64_t count, int64_t features,
                     Address bytes);

    // Adds a product of bytes; chunk and stride as in byte_product.cu.
    void multiply(const GemmWeights &weights, Address rows, int64_t count, int64_t chunk,
                  int64_t stride, Address product);

    // Makes the launches ignore NaN flags (N, flag_stride) beyond the lengths.
    void clear_padding(Address nan);

    // The results (T, N, width) are those of the caller, or a part of the workspace that
    // `finish_results` copies to the caller's layout.
    void start_results();
    void point_results(size_t place, int64_t offset);
    void finish_results();

 private:
    NetworkCall &call_;
    Address results_ = 0;  // null if the caller's are written directly
};

// The offset of a field in its arguments.
template <class Arguments, class Field>
size_t place_of(const Arguments &arguments, const Field &field) {
    return static_cast<size_t>(reinterpret_cast<const char *>(&field) -
                               reinterpret_cast<const char *>(&arguments));
}

Grid rows_grid(int64_t rows);  // a warp for each row

// Threads of a block for some elements: whole warps, at most 256.
unsigned threads_for(int64_t work);

// Containers as kernels name them.
inline int64_t kind_of(const QuantizerNumbers &q) { return static_cast<int64_t>(q.container()); }

// Launches for layers whose operators have at most 16 bits and whose weights fit registers.
// Returns false if there are others.
bool add_fast_layers(Launches &to);

// Launches for all widths and sizes.
void add_general_layers(Launches &to);

// Adds the recurrence of a cell of up to 16 bits, step by step. x, h0, out and last in `s` are
// codes in their containers.
void add_steps(Launches &to, Cell &cell, const SequenceC &s);

}  // namespace quant_gru::cuda
