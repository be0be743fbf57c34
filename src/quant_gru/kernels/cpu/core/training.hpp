// The jobs that the backward of one layer and direction passes to the instruction sets: plain data,
// as in plan.hpp. The gradient is linear in dL/dh' of each unit and step. The backward has three
// phases:
// 1. `derivatives` computes the derivatives for all steps at once from the codes of all states.
// 2. `recurrence`, one pass through time, turns derivatives into gradients of both projections.
// 3. `weight_products` multiplies these for the gradients of inputs and weights.
//
// Rows are processed in blocks and steps in chunks. An item is a row of the block at a step of the
// chunk, see `item_of`; steps count in the order of the forward. Channels have the layout of the
// fused kernel, [group][gate][unit], gates in the order update, reset, candidate. Units beyond H
// are zero.
#pragma once

#include "cpu/core/plan.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {

// The memory layout that the float products of an instruction set need.
struct ProductLayout {
    int group;    // units that are adjacent in memory
    int columns;  // columns of a panel of weights
    int block;    // features of codes that are adjacent in memory
};

// The steps first_step .. first_step + steps of a block of rows, with their buffers.
struct Chunk {
    int64_t T = 0, N = 0, first_step = 0, steps = 0, first_row = 0, rows = 0;
    bool reverse = false;
    const int64_t *lengths = nullptr;  // (N) or null
    int64_t sum_steps = 1;  // steps that are summed together; chunks start at multiples of it
    int groups = 0;
    // derivatives of both projections, later their gradients: [group][item][gate][unit]
    float *Wx = nullptr, *Rh = nullptr;
    int64_t stride = 0;       // floats from group to group
    float *direct = nullptr;  // derivatives of the state before the step: [group][item][unit]
    int64_t direct_stride = 0;
    // zero-point-free codes: [block of features][item][feature], see ProductLayout::block
    float *x = nullptr, *h = nullptr;
    int64_t code_stride = 0;  // floats from block to block
};

// Scales of the quantizers.
struct Scales {
    double x = 1, h = 1, Rh = 1, z = 1, r = 1, g = 1;
};

struct DerivativesJob {
    Chunk chunk;
    Scales scales;
    const void *x = nullptr, *h0 = nullptr, *out = nullptr;  // codes (T, N, C), (N, H), (T, N, H)
    const uint8_t *held = nullptr;                           // (T, N, H) or null
    int64_t first_row = 0, end_row = 0;
    void *workspace = nullptr;
};

// Dequantized weights in panels of columns: [panel][channel][column].
struct Panels {
    float *data = nullptr;
    int count = 0;
    int64_t channels = 0;  // groups * 3 * group
};

struct RecurrenceJob {
    Chunk chunk;
    Panels R;
    int H = 0;
    const float *grad_out = nullptr;  // dL/dh of each step
    int64_t grad_step = 0, grad_row = 0;
    float *dh = nullptr;  // (rows, width): in: dL/dh after the chunk; out: dL/dh before it
    int64_t width = 0;
    float *states = nullptr;  // (T, N, H): dL/dh after each step, or null
    int64_t first_row = 0, end_row = 0;
};

// Products with the gradients of both projections. For some groups, sums over all items of the
// chunk are added to the weight gradients. For some items, the gradients of inputs are computed.
struct WeightJob {
    Chunk chunk;
    int x_blocks = 0, h_blocks = 0;
    // [group][feature][gate][unit], features in whole blocks, in units of the codes; or null
    float *dW = nullptr, *dR = nullptr;
    double *dbw = nullptr, *dbr = nullptr;  // [group][gate][unit], or null
    int first_group = 0, end_group = 0;
    Panels W;
    int C = 0;
    float *dx = nullptr;  // (T, N, C), or null
    int64_t first_item = 0, end_item = 0;
};

// Internal linkage: functions compiled for one instruction set must not be linked into another.
namespace {

constexpr int kItems = 48;          // items whose derivatives are computed together
constexpr int kProductRows = 24;    // items whose dx is computed together
constexpr int64_t kSumItems = 128;  // items per partial sum of a weight gradient

inline int64_t item_of(const Chunk &c, int64_t step_in_chunk, int64_t row) {
    return step_in_chunk * c.rows + row - c.first_row;
}

inline int64_t step_of(const Chunk &c, int64_t place) {
    return c.reverse ? c.T - 1 - place : place;
}

inline bool counts(const Chunk &c, int64_t row, int64_t step) {
    return !c.lengths || c.lengths[row] > step;
}

}  // namespace

// The functions that every instruction set defines in addition to QG_INSTRUCTION_SET.
#define QG_TRAINING_SET(name)                                                     \
    namespace name {                                                              \
    extern const ProductLayout product_layout;                                    \
    void fused_derivatives(const FusedPlan &plan, const DerivativesJob &job);     \
    void general_derivatives(const GeneralPlan &plan, const DerivativesJob &job); \
    void wide_derivatives(const WidePlan &plan, const DerivativesJob &job);       \
    int64_t fused_derivatives_workspace(const FusedPlan &plan);                   \
    int64_t general_derivatives_workspace(const GeneralPlan &plan);               \
    int64_t wide_derivatives_workspace(const WidePlan &plan);                     \
    void recurrence(const RecurrenceJob &job);                                    \
    void wide_sums(const WideSums &job);                                          \
    void weight_products(const WeightJob &job);                                   \
    }
QG_TRAINING_SET(portable)
#if defined(QG_X86)
QG_TRAINING_SET(avx2)
QG_TRAINING_SET(avx_vnni)
QG_TRAINING_SET(avx512_vnni)
QG_TRAINING_SET(avx512_vbmi)
QG_TRAINING_SET(amx_int8)
#endif
#if defined(QG_NEON_DOT)
QG_TRAINING_SET(neon_dot)
#endif

}  // namespace quant_gru
