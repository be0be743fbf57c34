// Weights to the numbers of a plan, written where the plan has them.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cpu/core/plan.hpp"
#include "cpu/core/variants.hpp"

namespace quant_gru {

// Where the numbers of W or R and of its bias go, rows update, reset, candidate, and what they are
// made with.
struct WeightTarget {
    int64_t n = 0;             // inputs
    int bits = 8, b_bits = 8;  // of a code, and of one of the bias
    void *codes = nullptr, *b_codes = nullptr;
    int b_bytes = 1;  // of a code of the bias
    float *scales = nullptr, *b_scales = nullptr;
    int64_t *B = nullptr, *M = nullptr, *k = nullptr;
    double operand_scale = 1, result_scale = 1, b_unit = 1, limit = 0;
    int significant = 0;
};

struct WeightsPlan {
    int H = 0;
    bool free_scale = false;
    bool *finite = nullptr;  // becomes whether all weights are finite
    std::array<WeightTarget, 2> targets;
};

class Weights {
 public:
    Weights(const WeightsPlan &plan, const std::string &variant);

    // From float32 W (3H, C) and R (3H, H), rows reset, update, candidate, and biases (3H), null
    // for zeros. Codes of R that are `dropped` (3H, H) become 0, and its scales are divided by
    // `keep`. Returns whether anything was written: the bytes are compared with those before.
    bool write(std::array<const float *, 2> matrices, std::array<const float *, 2> biases,
               const uint8_t *dropped, float keep, int threads);
    // Others write the numbers, too: the next `write` does in any case.
    void forget() { is_last_ = false; }

 private:
    // W or R with its bias.
    struct Operand : WeightTarget {
        WeightRows rows, bias;
        std::vector<double> found, b_found;  // scales of rows
    };
    // Whether the values are those of the last `write`, which they are from now on.
    bool is_last(const std::array<const float *, 4> &values);
    void settle(const Operand &o, const uint8_t *dropped, float keep, int64_t first, int64_t end,
                double largest, double b_largest, float *space) const;

    int H_ = 0;
    bool *finite_;
    const Variant &variant_;
    std::array<Operand, 2> operands_;
    std::vector<float> zeros_;
    std::array<std::vector<float>, 4> last_;  // values of the last `write`
    bool is_last_ = false;                    // whether the numbers are of `last_`
};

}  // namespace quant_gru
