// The numbers of one layer and direction on a GPU, in the forms that kernels read.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/host/plans/gate_numbers.hpp"
#include "cuda/host/plans/projection.hpp"
#include "cuda/host/runtime.hpp"

namespace quant_gru::cuda {

// The numbers of one layer and direction, and how codes of the layer below become its input: a sum
// of one term for each direction of that layer. The owner of the numbers outlives this object.
struct CellInput {
    CellNumbers numbers;
    std::vector<SumNumbers> between;
};

// Arrays on a GPU that live as long as this object.
class Arrays {
 public:
    explicit Arrays(Device &device) : device_(device) {}

    template <class T>
    Address add(const std::vector<T> &values) {
        return add(values.data(), values.size() * sizeof(T));
    }
    Address add(const void *values, size_t bytes);

    // The same without contents.
    Address reserve(size_t bytes);

 private:
    Device &device_;
    std::vector<Memory> memory_;
};

// R as operands of the matrix instruction, for a shape of the recurrence.
struct Fragments {
    Address weights, bias, m;
};

// Operands of byte products with W: (columns, padded) weights, and what is added to the sums.
struct ByteWeights {
    Address weights, folded, folded_bytes, m_float;
    int64_t padded;
};

// W or R as operand of byte products with int_mm.cu and per_step.cu, which explain the planes.
struct GemmWeights {
    Address weights, folded;
    int64_t columns, third, padded;  // see byte_product.cu
    int planes;                      // bytes of a weight
};

class Cell {
 public:
    Cell(Device &device, const CellInput &input);

    // The zero point of x is one of its codes.
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

    const std::vector<SumNumbers> &between() const { return between_; }
    // M / 2^k of R h, (3H).
    Address multipliers_R() const { return matrices_[1].m; }
    Address finite() const { return finite_; }
    Address exact_W() const { return exact_[0]; }
    Address exact_R() const { return exact_[1]; }

    // W (3H, C) with the numbers of its rows.
    const MatrixC &W() const { return matrices_[0]; }

    // W and R transposed as int32, for the kernel of wide integers. Created at the first use.
    const std::array<MatrixC, 2> &transposed();

    // Operands of byte products for W (0) or R (1). Created at the first use.
    const GemmWeights &gemm(int which);

    // Whether int32 holds sums of byte products of that many features.
    static bool sums_fit(int64_t features) { return features < int64_t{1} << 17; }

    // Only if `projects_bytes`.
    const ByteWeights &bytes() const { return bytes_; }

    // The same weights in the layout of wgmma_pingpong.cuh. Created at the first use.
    Address tiles();

    const Fragments &fragments(int64_t features, int64_t units);

    // The gate arithmetic of a launch.
    template <class Real>
    CellC<Real> gates() const {
        return gates_.cell<Real>(places_);
    }
    const SaturatedC &saturated() const { return *gates_.saturated; }
    const GateTables &tables() const { return gates_.tables; }

 private:
    MatrixC matrix(int which);
    void add_bytes();
    std::array<int32_t, 2> exact_of_W() const;
    std::array<int32_t, 2> exact_of_R() const;
    Fragments packed(int64_t features, int64_t units);

    Arrays arrays_;
    const QuantizerNumbers border_;
    GateNumbers gates_;
    const CellNumbers &n_;  // its arrays are those of the input
    std::vector<SumNumbers> between_;
    std::array<TableAddresses, 3> places_{};
    Form form_;
    std::array<std::vector<double>, 2> m_;  // multipliers of W x and R h, (3H)
    std::array<MatrixC, 2> matrices_{}, transposed_{};
    std::array<Address, 2> exact_{};
    ByteWeights bytes_{};
    std::array<GemmWeights, 2> gemm_{};
    Address tiles_ = 0;
    Address finite_ = 0;
    std::mutex mutex_;  // guards what is created later
    std::map<std::pair<int64_t, int64_t>, Fragments> fragments_;
};

}  // namespace quant_gru::cuda
