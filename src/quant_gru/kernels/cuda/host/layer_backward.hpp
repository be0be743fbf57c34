// The launches of the backward of a layer, whoever starts them and owns their memory.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/host/launches.hpp"
#include "cuda/host/plans/backward_shapes.hpp"

namespace quant_gru::cuda {

enum class Element : int { int8, int32, float32, bfloat16, float64 };

constexpr int64_t element_bytes(Element element) {
    constexpr int64_t kBytes[] = {1, 4, 4, 2, 8};
    return kBytes[static_cast<int>(element)];
}

// A matrix in the workspace.
struct Matrix {
    int64_t start, rows, columns;
    Element element;

    Place place() const { return {Block::space, start}; }
    Matrix part(int64_t first, int64_t count) const {
        return {start + first * columns * element_bytes(element), count, columns, element};
    }
};

// How gradients are multiplied.
struct BackwardPrecision {
    int planes;          // bfloat16 parts of a gradient in the recurrence
    bool exact_weights;  // weights of more than 8 bits have two parts instead of being rounded
    bool half;           // derivatives are stored in half precision
    int operand;         // of the products after the recurrence: 0 bfloat16, 1 float32, 2 float64

    Element element() const {
        return operand == 0   ? Element::bfloat16
               : operand == 1 ? Element::float32
                              : Element::float64;
    }
};

struct WantedGradients {
    bool x, W, R, bw, br;
};

// What a direction reads and writes: addresses and, at the end, strides in values.
enum class Slot : int {
    x,
    values,  // codes, or real values in their place
    h0,
    out,  // codes of the initial state, or null for 0, and of the states after each step
    lengths,
    held,
    grad_out,
    grad_last,
    nan,  // gradients of the states; nan is added to grad_last
    dh0,
    bw,
    br,  // results
    W,
    R,
    s_W,
    s_R,
    Bw,
    Br,
    Mx,
    Mh,
    kx,
    kh,
    x_step,
    x_next,
    grad_step,
    grad_next,
    grad_unit
};
constexpr size_t kSlotCount = 27;

// One direction of a layer.
struct BackwardDirection {
    const Cell *cell;
    bool reverse;
    std::array<int64_t, 2> weight_kinds;  // containers of the codes of W and R
    std::array<Place, kSlotCount> at;     // where the slots are; numbers are fixed places
};

// What experiments and tests change.
struct BackwardPolicy {
    int64_t product_bytes = 32 << 20;  // the most of int32 sums of W x, or of R h
    int64_t codes_blocks = 528;        // per activation: 4 per multiprocessor of the largest GPU
    bool in_clusters = true;           // recurrences whose weights fit a cluster run in one
    bool from_bytes = true;            // one launch multiplies bytes and computes derivatives
    std::optional<std::pair<int64_t, int64_t>> derivatives;  // its warps of units, and groups
};

struct BackwardStep {
    std::optional<Launch> launch;
    // In place of a launch: left, right and result of a product, in which right is transposed if it
    // has bytes; or a matrix of words that become -1.
    std::vector<Matrix> matrices;
};

// A product of all steps, after the launches: left times right or, if `transposed`, left' right.
struct LastProduct {
    Matrix left, right;
    bool transposed;
};

struct LayerBackward {
    struct Results {
        std::optional<LastProduct> x, W, R;  // products whose results are gradients
        Matrix d;                            // gradients of the states after each step
    };

    std::vector<BackwardStep> steps;
    std::vector<Results> directions;
    int64_t space;  // bytes
};

// The backward of one direction, or of two whose sizes, widths and forms are equal. T and N are at
// least 1, and all operators have at most 16 bits. Throws std::invalid_argument if a variable of
// `backward_shapes.hpp` names no shape that fits.
LayerBackward layer_backward(const std::vector<BackwardDirection> &directions, int64_t T, int64_t N,
                             const WantedGradients &wanted, const BackwardPrecision &precision,
                             const Clusters &clusters, const BackwardPolicy &policy = {});

}  // namespace quant_gru::cuda
