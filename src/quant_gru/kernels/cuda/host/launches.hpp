// The launches of a call with T steps of N sequences, whoever starts them and owns their memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/host/cell.hpp"

namespace quant_gru::cuda {

// Memory that the arguments of a call point to: tensors of the caller, NaN flags and codes of
// states that a backward reads, the workspace, and both orders of packed rows. What is fixed has an
// address instead of an offset.
enum class Block : int { x, h0, lengths, y, h_n, nan, codes, space, sorted, unsorted, fixed };
constexpr size_t kBlockCount = 10;

struct Place {
    Block block;
    int64_t offset = 0;  // in bytes

    bool is_aligned() const { return offset % 16 == 0; }
    Place operator+(int64_t bytes) const { return {block, offset + bytes}; }
};

// A field of arguments that has an address. If the memory is not given, it is null.
struct Field {
    size_t at;  // in the arguments
    Place place;
};

// Where arguments describe x: two int64 with its strides of steps and sequences, in values, and an
// int32 that says whether four values may be loaded at once, or 0.
struct InputFields {
    size_t step, next, fours;
};

// A product of bytes that the caller computes: (count, padded) rows times the transposed weights of
// a cell give int32 (count, columns).
struct Product {
    const Cell *cell;
    int which;  // W (0) or R (1)
    int64_t count, padded, columns;
    Place rows, result;
};

struct Launch {
    Kernel kernel;
    Grid grid;
    std::vector<unsigned char> arguments;
    std::vector<Field> fields;
    std::optional<InputFields> input;
    bool with_lengths = false;       // only started if there are lengths
    std::optional<Product> product;  // in place of a kernel
};

// The arguments of a launch while they are filled.
template <class Arguments>
struct Draft {
    Arguments arguments{};
    std::vector<Field> fields;
    std::optional<InputFields> input;

    Arguments *operator->() { return &arguments; }

    template <class Member>
    size_t at(const Member &member) const {
        return static_cast<size_t>(reinterpret_cast<const char *>(&member) -
                                   reinterpret_cast<const char *>(&arguments));
    }
    template <class Member>
    void point(Member &member, Place place) {
        if (place.block == Block::fixed)
            member = static_cast<Address>(place.offset);
        else
            fields.push_back({at(member), place});
    }
};

// `bytes`: of the arguments.
template <class Arguments>
Launch launch_of(Kernel kernel, const Grid &grid, const Draft<Arguments> &draft,
                 size_t bytes = sizeof(Arguments)) {
    const auto *from = reinterpret_cast<const unsigned char *>(&draft.arguments);
    Launch launch{};
    launch.kernel = std::move(kernel);
    launch.grid = grid;
    launch.arguments.assign(from, from + bytes);
    launch.fields = draft.fields;
    launch.input = draft.input;
    return launch;
}

// Reserves aligned memory at the end of `size`, and returns its offset.
int64_t take(int64_t &size, int64_t bytes);

// What the launches of a call depend on besides its sizes. The numbers of dtypes are those of
// boundary/convert_rows.cu.
struct CallForm {
    int values = 0, states = 0, results = 0, last = 0;  // dtypes of x, h0, y and h_n
    bool has_states = true;                             // h0 may be given
    bool is_packed = false;     // x and y are packed rows; the order of states is the caller's
    bool keeps = false;         // codes and NaN flags of states, for a backward
    bool batch_first = false;   // of y; the caller knows the strides of x
    bool has_padding = false;   // lengths may be given, and steps beyond them are not finite
    bool own_products = false;  // products of bytes are kernels, not the caller's
};

// A GRU on a GPU.
struct Layers {
    int64_t C, H, directions;
    Chip chip;
    std::vector<std::unique_ptr<Cell>> cells;  // the directions of a layer are adjacent

    size_t layers() const { return cells.size() / static_cast<size_t>(directions); }
    Cell &cell(size_t layer, size_t direction) const {
        return *cells[layer * static_cast<size_t>(directions) + direction];
    }
};

// Codes (T, N, H) of the states of a cell.
struct KeptCodes {
    int64_t offset;
    Container container;
};

class Conversions;

// Gathers the launches of a call and lays out its workspace.
class Launches {
 public:
    // T and N are at least 1. `expect` is told of kernels that take long to compile, before the
    // arrays of cells are asked for.
    Launches(
        const Layers &layers, const CallForm &form, int64_t T, int64_t N,
        const ProjectionPolicy &policy = {},
        std::function<void(const Kernel &)> expect = [](const Kernel &) {});

    // Adds all launches; false if weights do not fit registers or codes have more than 16 bits.
    bool add_fast();

    // The same for all widths and sizes, without kept codes.
    void add_general();

    const Layers &layers;
    const CallForm form;
    const int64_t T, N;
    const ProjectionPolicy policy;
    const std::function<void(const Kernel &)> expect;

    std::vector<Launch> all;
    std::vector<KeptCodes> kept;
    int64_t space = 0, codes = 0;  // bytes

    // Memory of the workspace.
    Place reserve(int64_t bytes) { return {Block::space, take(space, bytes)}; }
    // Memory of the workspace for the result of a product, which all products share.
    Place product_room(int64_t bytes);
    // Memory for the codes of a cell's states that a backward reads.
    Place keep(Container container);

    // Adds a launch. `last` completes it.
    template <class Arguments>
    void add(Kernel kernel, const Grid &grid, const Draft<Arguments> &draft,
             size_t bytes = sizeof(Arguments)) {
        all.push_back(launch_of(std::move(kernel), grid, draft, bytes));
    }
    Launch &last() { return all.back(); }

    // Makes arguments read x, with members `real`, `step` and `next`.
    template <class Arguments, class Part>
    void read(Draft<Arguments> &draft, Part &part) const {
        draft.point(part.real, x_);
        if (x_.block == Block::x) {
            draft.input = InputFields{draft.at(part.step), draft.at(part.next), 0};
            return;
        }
        part.step = N * C();
        part.next = C();
    }
    // The same if four values can be loaded at once, which the member `fours` says.
    template <class Arguments, class Part>
    void read_fours(Draft<Arguments> &draft, Part &part) const {
        read(draft, part);
        if (draft.input)
            draft.input->fours = draft.at(part.fours);
        else
            part.fours = C() % 4 == 0;
    }

    // Float32 (states, N, H) and (T, N, width).
    Place h0() const { return h0_; }
    Place h_n() const { return h_n_; }
    Place y() const { return y_; }

    int64_t width() const { return layers.directions * H(); }
    int64_t H() const { return layers.H; }
    int64_t C() const { return layers.C; }

    // Bytes of NaN flags per sequence.
    int64_t flag_stride() const { return (T + 3) / 4 * 4; }

    // The sizes and containers of a cell.
    SequenceC sequence_of(const Cell &cell) const;

    // Adds the split of codes (count, features) in their container into bytes (planes, count,
    // padded).
    void split_codes(const QuantizerNumbers &q, Place codes, int64_t count, int64_t features,
                     Place bytes);

    // Adds a product of bytes with W (0) or R (1); chunk and stride as in byte_product.cu.
    void multiply(Cell &cell, int which, Place rows, int64_t count, int64_t chunk, int64_t stride,
                  Place product);

    // Makes the launches ignore NaN flags (N, flag_stride) beyond the lengths.
    void clear_padding(Place nan);

 private:
    Place room(int64_t values) { return reserve(4 * values); }
    void begin();
    void finish();
    void add(const Conversions &conversions);
    void place_results();

    int64_t product_bytes_ = 0;
    Place product_{};
    Place x_{Block::x}, h0_{Block::h0}, y_{Block::y}, h_n_{Block::h_n};
};

// A product of bytes, see byte_product.cu. Memory that is read of weights: up to two rows more
// than `columns`.
Launch byte_product(Place rows, Place weights, Place product, int64_t count, int64_t chunk,
                    int64_t stride, int64_t padded, int64_t columns);

Grid rows_grid(int64_t rows);  // a warp for each row

// Threads of a block for some elements: whole warps, at most 256.
unsigned threads_for(int64_t work);

// Containers as kernels name them.
inline int64_t kind_of(const QuantizerNumbers &q) { return static_cast<int64_t>(q.container()); }

// Adds launches for layers whose operators have at most 16 bits and whose weights fit registers.
// Returns false if there are others.
bool add_fast_layers(Launches &to);

// Adds launches for all widths and sizes.
void add_general_layers(Launches &to);

}  // namespace quant_gru::cuda
