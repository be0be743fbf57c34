// What quantizing one operator of a cell does to its states, and the quantizer for which it does
// least. Python and the C++ library choose scales with this code.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace quant_gru {

// The operators whose scales are chosen here.
enum class Quantized { Wx, Rh, z_pre, r_pre, g_pre, rRh, old_contrib, new_contrib, h };

// Steps of the float cell, as rows of a packed sequence: all sequences of step 0, those of step 1
// that are long enough, and so on; longest sequences first.
struct PackedSteps {
    int64_t H = 0;
    std::vector<int64_t> batch_sizes;  // sequences of each step
    bool reverse = false;              // whether the cell begins at the last step
    const float *Wx = nullptr;         // (rows, 3H), reset, update, candidate
    const float *Rh = nullptr;         // (rows, 3H)
    const float *before = nullptr;     // (rows, H), the state before each step
};

// The codes of an operator, the range of its values (0 included), and the smallest scale that
// covers this range.
struct Codes {
    double lo = 0, hi = 0;
    bool symmetric = false, free_scale = false;
    double low = 0, high = 0, covering = 1;
};

struct Choice {
    bool found = false;  // false if quantizing the operator has no effect at all
    double scale = 1, zero_point = 0;
};

class Effects {
 public:
    explicit Effects(const PackedSteps &steps);

    // The candidate with the least effect on the states of all steps.
    Choice choose(Quantized op, const Codes &codes);

    // The effect of a candidate: the sum of squares of the errors of all states, when only this
    // operator is quantized. The error of a state is z times the error of the state before, plus
    // the change of the step. `stretch` multiplies Wx and Rh.
    double effect(Quantized op, const Codes &codes, double scale, double zero_point,
                  double stretch);

 private:
    // The step's function around the float values; all (rows, H), in the order update, reset,
    // candidate where there are three.
    struct Values {
        double stretch = 0;
        std::vector<float> Wx[3], Rh[3], z_pre, r_pre, g_pre, z, r, g, rRh, old, fresh, h;
        std::vector<float> slope[3], curvature[3], reach;
        std::vector<float> from_old, from_new;  // h - g and 1 - z
    };
    const Values &values(double stretch);
    double sum(const Values &v, Quantized op, const Codes &codes, double scale, double zero_point,
               double limit);

    const PackedSteps steps_;
    int64_t rows_ = 0;
    std::vector<int64_t> offsets_;  // first row of each step
    std::array<Values, 2> values_;
    std::vector<float> error_;
};

}  // namespace quant_gru
