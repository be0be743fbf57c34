// Parts of the calibration data, kept to see what quantizing does to the states: the rules of
// calibration/windows.py.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "calibration/float_gru.hpp"

namespace quant_gru {

// Up to 32 steps of one sequence.
struct Window {
    int64_t steps = 0;
    std::vector<float> x;   // (steps, C)
    std::vector<float> h0;  // (layers * directions, H), the states from which each cell enters it
};

// The windows with the smallest hashes of their inputs, up to a number of steps. The order of the
// data and its split into batches do not matter.
class Windows {
 public:
    using Order = std::pair<uint64_t, int64_t>;  // hash and steps

    explicit Windows(int64_t H);

    // Offers all windows of a batch. x: (T, N, C). starts: `window_starts` of each cell.
    void add(const FloatInput &input, int64_t C, const std::vector<std::vector<float>> &starts);

    // In ascending order.
    const std::map<Order, Window> &kept() const { return kept_; }
    // Whether scales can be judged by what is kept.
    bool is_enough() const;

 private:
    bool takes(const Order &order) const { return !dropped_ || order < *dropped_; }
    // Of equal inputs, silence for example, only one is kept.
    void insert(const Order &order, Window window);

    int64_t H_, limit_, steps_ = 0;
    std::map<Order, Window> kept_;
    std::optional<Order> dropped_;  // everything from here on is refused
};

// The states (windows of a sequence, N, H) from which a cell enters each window. Entries of windows
// beyond the end of a sequence are 0.
std::vector<float> window_starts(const FloatInput &input, const FloatRun &run, int64_t H,
                                 bool reverse);

}  // namespace quant_gru
