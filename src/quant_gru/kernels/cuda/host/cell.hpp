// The numbers of one layer and direction on a GPU, in the forms that kernels read.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/host/derived_arrays.hpp"
#include "cuda/host/plans/gate_numbers.hpp"
#include "cuda/host/plans/projection.hpp"

namespace quant_gru::cuda {

constexpr int64_t padded_features(int64_t features) { return (features + 15) / 16 * 16; }

// One layer and direction. Derived classes hold its arrays, and may create them when they are asked
// for.
class Cell {
 public:
    virtual ~Cell() = default;
    Cell(const Cell &) = delete;
    Cell &operator=(const Cell &) = delete;

    // The zero point of x is one of its codes. Arrays are those of derived classes.
    const CellNumbers &numbers() const { return n_; }
    // The quantizer of real values of x, whose zero point may be no code.
    const QuantizerNumbers &border() const { return border_; }
    bool is_far() const { return border_.zero != n_.x.zero; }
    const Form &form() const { return form_; }
    int64_t C() const { return n_.W.inputs; }
    int64_t H() const { return n_.H; }
    int x_planes() const { return planes_of(n_.x.bits); }
    int64_t x_offset() const { return byte_offset(n_.x); }
    // The input projection for a recurrence.
    ProjectionSize projection(int64_t T, int64_t N, const RecurrenceShape &shape) const {
        // far values need more bits than the division without branches has
        const bool divided = divides(n_.x) && !is_far();
        return {T, N, C(), x_planes(), n_.W.weight_bits <= 8, divided, shape};
    }
    bool projects_bytes() const { return projection(1, 1, {}).projects_bytes(); }

    // How codes of the layer below become the input: a sum of one term for each direction.
    const std::vector<SumNumbers> &between() const { return between_; }

    // Whether int32 holds sums of byte products of that many features.
    static bool sums_fit(int64_t features) { return features < int64_t{1} << 17; }

    // The gate arithmetic of a launch.
    template <class Real>
    CellC<Real> gates() const {
        return gates_->cell<Real>(places_);
    }
    const SaturatedC &saturated() const { return *gates_->saturated; }
    const GateTables &tables() const { return gates_->tables; }

    // M / 2^k of R h, (3H).
    virtual Address multipliers_R() const = 0;
    virtual Address finite() const = 0;   // whether weights are
    virtual Address exact_W() const = 0;  // flags, see weights/derived.cuh
    virtual Address exact_R() const = 0;

    // W (3H, C) with the numbers of its rows.
    virtual MatrixC W() const = 0;

    // W and R transposed as int32, for the kernel of wide integers.
    virtual std::array<MatrixC, 2> transposed() = 0;

    // Operands of byte products for W (0) or R (1).
    virtual GemmWeights gemm(int which) = 0;

    // Only if `projects_bytes`.
    virtual ByteWeights bytes() const = 0;

    // The same weights in the layout of wgmma_pingpong.cuh.
    virtual Address tiles() = 0;

    virtual Fragments fragments(int64_t features, int64_t units) = 0;

 protected:
    Cell(const CellNumbers &numbers, std::shared_ptr<const GateNumbers> gates, const Form &form,
         std::vector<SumNumbers> between)
        : n_(numbers),
          border_(numbers.x),
          gates_(std::move(gates)),
          form_(form),
          between_(std::move(between)) {
        n_.x = n_.x.inner();
    }

    CellNumbers n_;
    const QuantizerNumbers border_;
    const std::shared_ptr<const GateNumbers> gates_;
    std::array<TableAddresses, 3> places_{};
    const Form form_;

 private:
    std::vector<SumNumbers> between_;
};

}  // namespace quant_gru::cuda
