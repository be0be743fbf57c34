// A cell whose arrays are copied to a GPU.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/host/cell.hpp"
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

class UploadedCell : public Cell {
 public:
    UploadedCell(Device &device, const CellInput &input);

    Address multipliers_R() const override { return matrices_[1].m; }
    Address finite() const override { return finite_; }
    Address exact_W() const override { return exact_[0]; }
    Address exact_R() const override { return exact_[1]; }
    MatrixC W() const override { return matrices_[0]; }
    ByteWeights bytes() const override { return bytes_; }

    // R (3H, H) with the numbers of its rows, for a backward. Created at the first use, as is all
    // that follows.
    MatrixC R();

    std::array<MatrixC, 2> transposed() override;
    GemmWeights gemm(int which) override;
    Address tiles() override;
    Fragments fragments(int64_t features, int64_t units) override;

 private:
    UploadedCell(Device &device, const CellInput &input, std::shared_ptr<const GateNumbers> gates);
    MatrixC matrix(int which);
    Address codes(int which);
    void add_bytes();
    std::array<int32_t, 2> exact_of_W() const;
    std::array<int32_t, 2> exact_of_R() const;
    Fragments packed(int64_t features, int64_t units);

    Arrays arrays_;
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
