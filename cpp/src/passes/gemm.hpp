// Matrix products of float and double matrices. Threads divide them by panels and rows; results do
// not depend on the division.
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

    // Sets the sizes of B.
    void resize(int64_t K, int64_t N);

    // Packs the panels of one of several parts of B (K, N), contiguous rows. Columns beyond N are
    // zeros.
    void pack(const T *B, int64_t part, int64_t parts);

    // Rows first .. end of C (M, N) = A B, or C += A B with `add`. Rows of C are contiguous.
    void multiply(const Strided<T> &A, int64_t first, int64_t end, T *C, bool add) const;

 private:
    int64_t K_ = 0, N_ = 0, panels_ = 0;
    std::vector<T> data_;
};

// Where part number `part` of `parts` of n things starts; where it ends, the next one starts.
inline int64_t part_start(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

}  // namespace quant_gru
