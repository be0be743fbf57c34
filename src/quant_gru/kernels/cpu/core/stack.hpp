// All layers and directions of a GRU. Inputs and outputs are real values.
#pragma once

#include <vector>

#include "cpu/core/boundary.hpp"
#include "cpu/core/layer.hpp"
#include "cpu/core/memory.hpp"
#include "cpu/core/real_values.hpp"

namespace quant_gru {

// Fills memory with one code.
void fill_codes(void *codes, Container container, int64_t count, int64_t code);

class Stack {
 public:
    // layers[layer][direction]; between[layer - 1][direction][direction below].
    // finite[layer * directions + direction]: 1 if all weights are finite; each call reads it.
    Stack(std::vector<std::vector<const Layer *>> layers,
          std::vector<std::vector<std::vector<Requantizer>>> between,
          std::vector<const uint8_t *> finite);

    Stack(const Stack &) = delete;
    Stack &operator=(const Stack &) = delete;

    int directions() const { return static_cast<int>(layers_[0].size()); }
    size_t depth() const { return layers_.size(); }
    const Layer &layer(size_t i, int direction) const { return *layers_[i][direction]; }

    const Requantizer &between(size_t layer, int direction, int half) const {
        return between_[layer - 1][static_cast<size_t>(direction)][static_cast<size_t>(half)];
    }
    // Computes the input codes of a layer, (rows, directions * H) for each direction, from the
    // states (rows, H) of each direction below.
    void requantize(size_t layer, const void *const *below, void *const *codes, int64_t rows) const;

    struct Call {
        const float *x = nullptr;  // (T, N, C), strides in elements
        int64_t x_step = 0, x_row = 0;
        const float *h0 = nullptr;  // (layers * directions, N, H), null for zeros
        float *y = nullptr;         // (T, N, directions * H)
        int64_t y_step = 0, y_row = 0;
        float *last = nullptr;             // (layers * directions, N, H)
        void *const *kept = nullptr;       // receive the codes (T, N, H) of each, or null
        const int64_t *lengths = nullptr;  // (N) or null
        int64_t T = 0, N = 0;
        int threads = 1;
    };
    // Rows that NaN reaches become NaN in y and last. Codes are computed with 0 in place of NaN.
    void run(const Call &call);

    // A call with real values of any dtype and layout.
    struct RealCall {
        RealValues x, h0, y, last;         // shapes as above; h0 absent for zeros
        void *const *kept = nullptr;       // as above
        float *nan = nullptr;              // receives (cells, N): NaN for NaN rows, else 0; or null
        const int64_t *lengths = nullptr;  // (N) or null
        int64_t T = 0, N = 0;
        int threads = 1;
    };
    void run(const RealCall &call);

    // Runs one step with states as codes: state[layer] is (N, H), read and written. Returns whether
    // an input was NaN; y is then computed with 0 in its place. It allocates nothing.
    bool step(const float *x, int64_t N, void *const *state, float *y, void *workspace) const;
    int64_t step_workspace(int64_t N) const;  // bytes

    // Sets states of `step` to zero.
    void clear(int64_t N, void *const *state) const;

 private:
    bool has_finite_weights() const;
    void mark_nan(const Call &call) const;

    std::vector<std::vector<const Layer *>> layers_;
    std::vector<std::vector<std::vector<Requantizer>>> between_;
    std::vector<const uint8_t *> finite_;
    int64_t code_bytes_ = 4;  // of the largest code between layers
    Scratch scratch_, codes_;
};

}  // namespace quant_gru
