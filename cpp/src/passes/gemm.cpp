#include "passes/gemm.hpp"

#include <algorithm>
#include <cstdlib>  // defines __GLIBC__
#include <cstring>

#include "cpu/core/clones.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kRows = 6;       // rows that share the loads of a panel
constexpr int64_t kRowBlock = 96;  // rows of A that stay in the level-2 cache
constexpr int64_t kWide = 4;       // panels that a single row runs through together

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float type __attribute__((vector_size(64)));
};
template <>
struct Lanes<double> {
    typedef double type __attribute__((vector_size(128)));
};

// One block of a product: R rows and P panels.
template <class T>
struct Tile {
    const T *A;
    int64_t row, column;  // strides of A
    const T *B;           // (P, depth, 16), panels `panel` elements apart
    int64_t panel, depth;
    T *C;
    int64_t to_row, rows, columns;  // rows and columns to write
    bool add;
};

template <class T, int64_t R, int64_t P>
QG_BODY void tile(const Tile<T> &t) {
    using V = typename Lanes<T>::type;
    constexpr int64_t width = PackedMatrix<T>::kPanel;
    V sums[R][P] = {};
    const T *from[R];
    // rows beyond the end repeat the last row; their sums are not written
    for (int64_t i = 0; i < R; ++i) from[i] = t.A + (i < t.rows ? i : t.rows - 1) * t.row;
    for (int64_t k = 0; k < t.depth; ++k) {
        V b[P];
        for (int64_t p = 0; p < P; ++p)
            std::memcpy(&b[p], t.B + p * t.panel + k * width, sizeof(V));
        for (int64_t i = 0; i < R; ++i)
            for (int64_t p = 0; p < P; ++p) sums[i][p] += from[i][k * t.column] * b[p];
    }
    for (int64_t i = 0; i < R && i < t.rows; ++i)
        for (int64_t p = 0; p < P; ++p) {
            T *to = t.C + i * t.to_row + p * width;
            const int64_t left = t.columns - p * width;
            V found = {};
            if (left >= width) {
                if (t.add) std::memcpy(&found, to, sizeof found);
                found += sums[i][p];
                std::memcpy(to, &found, sizeof found);
            } else if (left > 0) {
                const auto bytes = static_cast<size_t>(left) * sizeof(T);
                if (t.add) std::memcpy(&found, to, bytes);
                found += sums[i][p];
                std::memcpy(to, &found, bytes);
            }
        }
}

QG_CLONES void rows_of(const Tile<float> &t) { tile<float, kRows, 1>(t); }
QG_CLONES void rows_of(const Tile<double> &t) { tile<double, kRows, 1>(t); }
QG_CLONES void row_of(const Tile<float> &t) { tile<float, 1, kWide>(t); }
QG_CLONES void row_of(const Tile<double> &t) { tile<double, 1, kWide>(t); }

}  // namespace

template <class T>
void PackedMatrix<T>::resize(int64_t K, int64_t N) {
    K_ = K;
    N_ = N;
    panels_ = (N + kPanel - 1) / kPanel;
    data_.resize(static_cast<size_t>(K * panels_ * kPanel));
}

template <class T>
void PackedMatrix<T>::pack(const T *B, int64_t part, int64_t parts) {
    const int64_t begin = part_start(panels_, part, parts),
                  end = part_start(panels_, part + 1, parts);
    for (int64_t first = 0; first < K_; first += kBlock) {
        const int64_t depth = K_ - first < kBlock ? K_ - first : kBlock;
        T *to = data_.data() + (first * panels_ + begin * depth) * kPanel;
        for (int64_t p = begin; p < end; ++p)
            for (int64_t k = 0; k < depth; ++k, to += kPanel) {
                const int64_t left = N_ - p * kPanel, count = left < kPanel ? left : kPanel;
                std::memcpy(to, B + (first + k) * N_ + p * kPanel,
                            static_cast<size_t>(count) * sizeof(T));
                std::fill(to + count, to + kPanel, T(0));
            }
    }
}

template <class T>
void PackedMatrix<T>::multiply(const Strided<T> &A, int64_t begin, int64_t last, T *C,
                               bool add) const {
    for (int64_t first = 0; first < K_; first += kBlock) {
        const int64_t depth = K_ - first < kBlock ? K_ - first : kBlock, panel = depth * kPanel;
        const T *B = data_.data() + first * panels_ * kPanel;
        for (int64_t block = begin; block < last; block += kRowBlock) {
            const int64_t end = last - block < kRowBlock ? last : block + kRowBlock;
            for (int64_t p = 0; p < panels_;) {
                const bool wide = end - block < 3 && panels_ - p >= kWide;
                const int64_t rows = wide ? 1 : kRows;
                for (int64_t i = block; i < end; i += rows) {
                    const Tile<T> t{A.data + i * A.row + first * A.column,
                                    A.row,
                                    A.column,
                                    B + p * panel,
                                    panel,
                                    depth,
                                    C + i * N_ + p * kPanel,
                                    N_,
                                    end - i < rows ? end - i : rows,
                                    N_ - p * kPanel,
                                    add || first > 0};
                    if (wide)
                        row_of(t);
                    else
                        rows_of(t);
                }
                p += wide ? kWide : 1;
            }
        }
    }
}

template class PackedMatrix<float>;
template class PackedMatrix<double>;

}  // namespace quant_gru
