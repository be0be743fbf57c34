// The float GRU in windows.
#pragma once

#include "calibration/windows.hpp"

namespace quant_gru {

// All steps of a cell in windows, as rows of a packed sequence: all windows of step 0, those of
// step 1 that are long enough, and so on; longest windows first.
struct CellSteps {
    // The row of the step of window n that is processed as number i.
    int64_t row(int64_t i, int64_t n) const {
        const auto window = static_cast<size_t>(n);
        return offsets[static_cast<size_t>(reverse ? lengths[window] - 1 - i : i)] + n;
    }
    int64_t rows() const { return static_cast<int64_t>(before.size()) / H; }

    int64_t C = 0, H = 0;
    bool reverse = false;              // whether the cell begins at the last step of a window
    std::vector<int64_t> lengths;      // steps of each window
    std::vector<int64_t> batch_sizes;  // windows of each step
    std::vector<int64_t> offsets;      // first row of each step
    std::vector<float> x;              // (rows, C)
    std::vector<float> Wx, Rh;         // (rows, 3H), reset, update, candidate
    std::vector<float> before, after;  // (rows, H), the states before and after each step
};

// Runs the float GRU on the windows. Returns the steps of each cell.
std::vector<CellSteps> steps_in(const Windows &windows, const GRUShape &shape,
                                const std::vector<FloatCell> &cells);

}  // namespace quant_gru
