// The backward of one layer and direction: straight-through gradients in float32.
#pragma once

#include "cpu/core/layer.hpp"

namespace quant_gru {

// What a backward reads of a plan, besides its layer: codes of weights and their scales, in rows
// update, reset, candidate.
struct CellWeights {
    const void *W = nullptr, *R = nullptr;                 // (3H, C), (3H, H)
    int W_bytes = 1, R_bytes = 1;                          // of a code
    const float *W_scales = nullptr, *R_scales = nullptr;  // (3H)
    Scales scales;
};

// Everything is contiguous but grad_out, whose units stand side by side. Null: not wanted.
struct BackwardCall : CellWeights {
    // what the forward took in and gave, in containers
    const void *x = nullptr, *h0 = nullptr, *out = nullptr;  // (T, N, C), (N, H), (T, N, H)
    const uint8_t *held = nullptr;                           // (T, N, H) or null
    const int64_t *lengths = nullptr;                        // (N) or null
    int64_t T = 0, N = 0;
    bool reverse = false;
    const float *grad_out = nullptr, *grad_last = nullptr;  // (T, N, H), (N, H)
    int64_t grad_step = 0, grad_row = 0;
    // results; rows reset, update, candidate
    float *dx = nullptr, *dh0 = nullptr;  // dh0 always
    float *dh = nullptr;                  // of the state after each step
    float *dW = nullptr, *dR = nullptr, *dbw = nullptr, *dbr = nullptr;
    int64_t chunk_items = 1;  // rows times steps that are taken at once, about, at most
    int threads = 1;
};

// The same bits for any number of threads and size of chunks.
void run_backward(const Layer &layer, const BackwardCall &call);

}  // namespace quant_gru
