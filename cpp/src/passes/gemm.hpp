// Matrix products of float and double matrices on one core.
#pragma once

#include <cstdint>
#include <vector>

namespace quant_gru {

// A matrix A (M, K) with any strides, in elements.
template <class T>
struct Strided {
    const T *data = nullptr;
    int64_t row = 0, column = 0;
};

// The right factor B (K, N) of products, in panels of 16 columns and blocks of `kBlock` rows.
template <class T>
class PackedMatrix {
 public:
    static constexpr int64_t kPanel = 16;
    static constexpr int64_t kBlock = 256;

    // Packs B (K, N), contiguous rows. Columns beyond N are zeros.
    void pack(const T *B, int64_t K, int64_t N);

    // C (M, N) = A B, or C += A B with `add`. Rows of C are `to_row` elements apart.
    void multiply(const Strided<T> &A, int64_t M, T *C, int64_t to_row, bool add) const;

 private:
    int64_t K_ = 0, N_ = 0, panels_ = 0;
    std::vector<T> data_;
};

// C (M, N) = A B, or C += A B, for a B (K, N) that is used once.
template <class T>
void multiply(const Strided<T> &A, int64_t M, const T *B, int64_t K, int64_t N, T *C, bool add) {
    PackedMatrix<T> packed;
    packed.pack(B, K, N);
    packed.multiply(A, M, C, N, add);
}

}  // namespace quant_gru
