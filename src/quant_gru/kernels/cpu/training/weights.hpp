// Computes the weight part of a plan from float weights, in the memory of the plan.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cpu/core/plan.hpp"
#include "cpu/core/variants.hpp"

namespace quant_gru {

// The destination of the numbers of W or R and of its bias, rows update, reset, candidate, and the
// constants from which they are computed.
struct WeightTarget {
    int64_t n = 0;             // inputs
    int bits = 8, b_bits = 8;  // width of a weight code and of a bias code
    void *codes = nullptr, *b_codes = nullptr;
    int b_bytes = 1;  // bytes of a bias code
    float *scales = nullptr, *b_scales = nullptr;
    int64_t *B = nullptr, *M = nullptr, *k = nullptr;
    double operand_scale = 1, result_scale = 1, b_unit = 1, limit = 0;
    int significant = 0;
    // The correction of the bias, see WeightRows; null without one.
    const double *factors = nullptr;
    double term_limit = 0;
    int unit_exponent = 0;
};

struct WeightsPlan {
    int H = 0;
    bool free_scale = false;
    bool *finite = nullptr;  // receives whether all weights are finite
    std::array<WeightTarget, 2> targets;
};

class Weights {
 public:
    Weights(const WeightsPlan &plan, const std::string &variant);

    // Writes all numbers from float32 W (3H, C) and R (3H, H), rows reset, update, candidate, and
    // biases (3H), null for zeros. Codes of R that are `dropped` (3H, H) become 0, and the scales
    // of R are divided by `keep`. Returns false, and writes nothing, if nothing is dropped and all
    // bytes of the values equal those of the last call.
    bool write(std::array<const float *, 2> matrices, std::array<const float *, 2> biases,
               const uint8_t *dropped, float keep, int threads);
    // Makes the next `write` write in any case, because other code has written the numbers.
    void forget() { is_last_ = false; }

 private:
    // W or R with its bias.
    struct Operand : WeightTarget {
        WeightRows rows, bias;
        std::vector<double> found, b_found;  // scales of rows
        std::vector<float> corrected;        // the bias with its correction
        double largest = 0, b_largest = 0;   // of the scales
    };
    // Returns whether the values equal those of the last `write`, and records them.
    bool is_last(const std::array<const float *, 4> &values);
    // Writes the codes of a row. Returns the sum of its mean errors.
    double write_codes(const Operand &o, int64_t row, const uint8_t *dropped, float *space) const;
    // Writes all other numbers of a row.
    void write_numbers(const Operand &o, int64_t row, bool dropped, float keep) const;
    // Writes rows first..end. If the bias is corrected, writes only codes, and finds the bias and
    // its scales.
    void settle(Operand &o, const uint8_t *dropped, float keep, int64_t first, int64_t end,
                float *space) const;
    int64_t channel_of(int64_t row) const {
        const int64_t gate = row / H_ == 0 ? 1 : row / H_ == 1 ? 0 : 2;
        return gate * H_ + row % H_;
    }

    int H_ = 0;
    bool *finite_;
    const Variant &variant_;
    std::array<Operand, 2> operands_;
    std::vector<float> zeros_;
    std::array<std::vector<float>, 4> last_;  // values of the last `write`
    bool is_last_ = false;                    // whether the numbers are those of `last_`
};

}  // namespace quant_gru
