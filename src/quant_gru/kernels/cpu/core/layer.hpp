// One layer and direction: its plan in the form of one instruction set, and how to run it.
#pragma once

#include <nanobind/nanobind.h>

#include "cpu/core/memory.hpp"
#include "cpu/core/plan.hpp"
#include "cpu/core/variants.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {

// The numbers of W x or R h, where the plan has them.
struct Matrix {
    const void *codes = nullptr;  // (3H, inputs)
    Container kind = Container::i32;
    const int64_t *bias = nullptr, *M = nullptr, *k = nullptr;
    int64_t lo = 0, hi = 0, zero = 0, reach = 0;
    int weight_bits = 0, operand_bits = 0;
    bool operand_signed = true;
};

class Layer {
 public:
    // The numbers are those of executor.py.
    Layer(const nanobind::dict &numbers, const std::string &variant);
    Layer(const Layer &) = delete;
    Layer &operator=(const Layer &) = delete;

    // Reads the weights' numbers again from where they were, and are now others. Not of wide ones.
    void repack();

    // Which kernel runs it.
    enum class Kind { fused, general, wide };
    Kind kind() const { return kind_; }
    const Variant &variant() const { return variant_; }
    const FusedPlan &fused() const { return fused_; }
    const GeneralPlan &general() const { return general_; }
    bool in_float() const { return cell().in_float; }
    int H() const { return H_; }
    int C() const { return C_; }
    const Border &x() const { return cell().x; }
    const Border &h() const { return cell().h; }

    // Bytes of working memory for some rows and all steps of a job.
    int64_t workspace(int64_t rows, int64_t T) const;

    // Rows first_row..end_row of a job, in this thread. Returns whether an input was NaN.
    bool run(const Job &job) const;

    // Multiply-accumulates of a row and a step, gates included, for deciding about threads.
    double work() const;

 private:
    const Cell &cell() const;
    void fill(Cell &cell, const nanobind::dict &numbers);
    void table(const nanobind::dict &numbers, const char *name, Table &t);
    void prepare(Table &t);
    void arrange();
    bool pack(const Matrix &matrix, Packed &p, int inputs, bool &in_float, bool &exact,
              bool &powers);
    void pack_general(const Matrix &matrix, const Border &operand, Projection &p, int inputs,
                      int64_t &bound);
    void keep(const nanobind::dict &numbers, WideProjection &p, int inputs);

    int H_ = 0, C_ = 0;
    Matrix W_, R_;
    bool float32_ = false;  // as far as the frozen numbers are concerned
    double product_ = 0;
    Kind kind_ = Kind::wide;
    const Variant &variant_;
    FusedPlan fused_;
    GeneralPlan general_;
    WidePlan wide_;
    Arena arena_;
};

// A job of a layer.
struct Task {
    const Layer *layer;
    Job job;
};

// Runs tasks that do not depend on each other, split over at most `threads` threads where that
// pays. Returns whether an input was NaN.
bool run_tasks(const std::vector<Task> &tasks, int threads, Scratch &scratch);

}  // namespace quant_gru
