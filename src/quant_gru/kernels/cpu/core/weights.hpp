// Weights to the numbers of a plan, written where the plan has them.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <string>
#include <vector>

#include "cpu/core/plan.hpp"
#include "cpu/core/variants.hpp"

namespace quant_gru {

class Weights {
 public:
    // The numbers are those of weights.py.
    Weights(const nanobind::dict &numbers, const std::string &variant);

    // From float32 W (3H, C) and R (3H, H), rows reset, update, candidate, and biases (3H), null
    // for zeros. Codes of R that are `dropped` (3H, H) become 0, and its scales are divided by
    // `keep`. Returns whether anything was written: the bytes are compared with those before.
    bool write(std::array<const float *, 2> matrices, std::array<const float *, 2> biases,
               const uint8_t *dropped, float keep, int threads);
    // Others write the numbers, too: the next `write` does in any case.
    void forget() { is_last_ = false; }

 private:
    // W or R with its bias; what is pointed at has rows update, reset, candidate.
    struct Operand {
        WeightRows rows, bias;
        void *codes, *b_codes;
        int b_kind;  // bytes of a code of the bias
        float *scales, *b_scales;
        int64_t *B, *M, *k;
        double operand_scale, result_scale, b_unit, limit;
        int significant;
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
