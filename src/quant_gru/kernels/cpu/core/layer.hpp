// One layer and direction: its plan laid out for one instruction set.
#pragma once

#include <string>

#include "cpu/core/memory.hpp"
#include "cpu/core/plan.hpp"
#include "cpu/core/variants.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {

class Layer {
 public:
    Layer(const LayerPlan &plan, const std::string &variant);
    Layer(const Layer &) = delete;
    Layer &operator=(const Layer &) = delete;

    // Reads the weights again from the same addresses, after they changed.
    void repack();

    // The kernel that runs the layer.
    enum class Kind { fused, general, wide };
    Kind kind() const { return kind_; }
    const Variant &variant() const { return variant_; }
    const FusedPlan &fused() const { return fused_; }
    const GeneralPlan &general() const { return general_; }
    const WidePlan &wide() const { return wide_; }
    bool in_float() const { return cell().in_float; }
    int H() const { return H_; }
    int C() const { return C_; }
    const Quantizer &x() const { return cell().x; }
    const Quantizer &h() const { return cell().h; }

    // Size of the workspace for some rows and all steps of a job, in bytes.
    int64_t workspace(int64_t rows, int64_t T) const;

    // Runs rows first_row..end_row of a job in this thread. Returns whether an input was NaN.
    bool run(const Job &job) const;

    // Cost of a row and a step in multiply-accumulates, gates included. It decides about threads.
    double work() const;

 private:
    const Cell &cell() const;
    void arrange();
    void pack_generic();

    int H_ = 0, C_ = 0;
    Matrix W_, R_;
    bool narrow_ = false, float32_ = false;
    double product_ = 0;
    Kind kind_ = Kind::wide;
    const Variant &variant_;
    FusedPlan fused_;
    GeneralPlan general_;
    WidePlan wide_;
    Arena arena_;
};

}  // namespace quant_gru
