// Arrays of a cell that a kernel derives from its codes (weights/derive.cu), when they are first
// asked for.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "cuda/host/plans/cell_form.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// The arguments of the kernels in weights, see weight_rows.cuh.
struct OperandC {
    Address w, b, dropped, w_scale, b_scale;
    Address codes, b_codes, scales, b_scales, B, M, k, m;
    Address gemm, tiles, folded, folded_bytes, m_float, exact_float, factors, corrected;
    int64_t w_real, b_real, kind, b_kind, K, padded, planes, significant, fold, fold_words, reach;
    double lo, hi, b_lo, b_hi, operand_scale, result_scale, b_unit, limit, term_limit;
    int64_t bits, b_bits, whole, long_sums, unit_exponent;
    double added;
};

struct FragmentsC {
    Address bytes, bias, m;
    int64_t features, units;
};

constexpr size_t kMostFragments = 4;

struct WeightsC {
    OperandC operands[2];
    FragmentsC fragments[kMostFragments];
    Address finite;
    int64_t H, count, planes_R, free;
    float keep;
    Address columns[2];
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
    int64_t columns, padded;  // there is memory for two rows more than columns
    int planes;               // bytes of a weight
};

// W or R on a GPU: codes (3H, K), and bias, M and k of each row in int64.
struct StoredMatrix {
    Address codes, bias, M, k;
    Container kind;
};

// What W (0) or R (1) is multiplied with, and the matrix.
inline const QuantizerNumbers &operand_of(const CellNumbers &n, int which) {
    return which ? n.h : n.x;
}
inline const MatrixNumbers &weights_of(const CellNumbers &n, int which) {
    return which ? n.R : n.W;
}

// The numbers of all rows of W or R, without addresses and container.
MatrixC row_numbers(const CellNumbers &n, int which);

// Sizes of operands of byte products.
GemmWeights gemm_sizes(const CellNumbers &n, int which);

// A bound on what is added to W x before rounding to a byte, see `finish_held`. Twice that with
// rules other than half_even: float32 then has steps of the multiplier there.
double added_to_bytes(const CellNumbers &n);

// Not safe for several threads at once.
class DerivedArrays {
 public:
    // Returns the address of so many bytes of zeros, which live as long as this object.
    using Allocate = std::function<Address(int64_t bytes)>;

    // Reads sizes, widths and quantizers of the numbers, whose zero point of x is one of its codes.
    DerivedArrays(const CellNumbers &numbers, const Form &form,
                  const std::array<StoredMatrix, 2> &stored, Allocate allocate);
    // The same, with another owner of the arrays that are asked for later.
    DerivedArrays(const DerivedArrays &other, Allocate allocate);

    // W (0) or R (1) with the numbers of its rows.
    MatrixC matrix(int which);
    // The same transposed as int32, for the kernel of wide integers.
    MatrixC transposed(int which);
    // M / 2^k of each row, (3H) in float64.
    Address multipliers(int which);
    // Flags, see derived.cuh.
    Address exact(int which);
    GemmWeights gemm(int which);
    // Only of weights in bytes.
    ByteWeights bytes();
    // 8-bit W in the layout of wgmma_pingpong.cuh.
    Address tiles();
    Fragments fragments(int64_t features, int64_t units);

    // The number of arrays so far.
    int64_t count() const { return count_; }
    // The arguments of launches that write the arrays which have been asked for since the last call
    // of this function. Kernels may read the others meanwhile.
    std::vector<WeightsC> take_new();
    // The same of all arrays.
    std::vector<WeightsC> arguments() const;
    // Lets an update write them. Returns whether it then writes all of them.
    bool add_to(WeightsC &update) const;

 private:
    Address made(Address &array, int64_t bytes);
    OperandC &operand(int which) { return all_.operands[which]; }

    CellNumbers n_;
    Form form_;
    Allocate allocate_;
    WeightsC all_{}, written_{};  // without fragments
    std::map<std::pair<int64_t, int64_t>, Fragments> fragments_, written_fragments_;
    int64_t count_ = 0, written_count_ = 0;
};

}  // namespace quant_gru::cuda
