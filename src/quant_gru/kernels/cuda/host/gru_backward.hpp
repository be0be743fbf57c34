// The launches of the backward of a whole GRU, from the last layer to the first.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/host/layer_backward.hpp"

namespace quant_gru::cuda {

// The tensors of a backward. From `outs` on: the codes of the states of each cell (T, N, H), then
// the gradients of x, h0 and of W, R, bw and br of each cell. `lengths` are those of packed rows
// with the starts of steps, see Packing in Python.
enum class GRUTensor : int {
    space,
    x,
    h0,
    lengths,
    nan,
    grad_y,
    grad_last,
    sorted,
    unsorted,
    outs
};

// The tensor of a place in a GRU's backward.
int64_t tensor_of(const Place &place);

// A tensor of real values: its dtype, in the numbers of boundary/convert_rows.cu, and its strides
// in values. Packed rows have no stride of steps.
struct RealLayout {
    int kind;
    int64_t step, next, unit;
};

// What the launches depend on besides the cells.
struct GRUBackwardForm {
    int64_t T, N;
    bool is_packed;
    RealLayout x;
    std::optional<RealLayout> h0, grad_y, grad_last;  // absent ones are zeros
    int weights;                                      // dtype of the gradients of weights
    std::vector<bool>
        wanted;  // gradients: x, h0, and of each cell W, R and, with biases, bw and br
};

// The weights of a cell: addresses of the slots from W to kh, and the containers of W and R.
struct GRUCell {
    std::unique_ptr<Cell> cell;
    std::array<int64_t, 2> weight_kinds;
    std::array<Address, 10> weights;
};

// A product of all steps whose result is a gradient.
struct GradientProduct {
    LastProduct product;
    Place result;
};

struct GRUBackwardStep {
    std::optional<Launch> launch;
    // In place of a launch: as in BackwardStep, or products one after the other.
    std::vector<Matrix> matrices;
    std::vector<GradientProduct> products;
};

struct GRUBackward {
    std::vector<GRUBackwardStep> steps;
    int64_t space;  // bytes
};

// cells: the directions of a layer are adjacent. zero: address of a float32 zero. T, N and all
// features are at least 1, and all operators have at most 16 bits. All steps are computed at once.
GRUBackward gru_backward(std::vector<GRUCell> cells, int64_t directions,
                         const GRUBackwardForm &form, Address zero,
                         const BackwardPrecision &precision, const Clusters &clusters,
                         const BackwardPolicy &policy);

}  // namespace quant_gru::cuda
