// The rows of a packed sequence, step after step: step t has the first batch_sizes[t] rows.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

struct PackedRows {
    int64_t N;      // rows of the first step
    int64_t rows;   // rows of all steps
    int64_t wrong;  // the first step whose size is negative or exceeds the previous one, or -1
};

inline PackedRows packed_rows(const int64_t *batch_sizes, int64_t T) {
    PackedRows found{batch_sizes[0], 0, -1};
    for (int64_t t = 0; t < T; ++t) {
        if (batch_sizes[t] < 0 || batch_sizes[t] > batch_sizes[t ? t - 1 : 0]) return {0, 0, t};
        found.rows += batch_sizes[t];
    }
    return found;
}

// Writes the number of steps of each of N rows, then the start of the rows of each of T steps, then
// their end. The sizes must be checked already; N is the first of them.
inline void packed_layout(const int64_t *batch_sizes, int64_t T, int64_t N, int64_t *to) {
    int64_t n = 0;
    for (int64_t t = T; t > 0; --t)
        for (; n < batch_sizes[t - 1]; ++n) to[n] = t;
    int64_t *const starts = to + N;
    starts[0] = 0;
    for (int64_t t = 0; t < T; ++t) starts[t + 1] = starts[t] + batch_sizes[t];
}

// Returns the first of N indices that is not in 0..N-1, or -1.
inline int64_t wrong_index(const int64_t *indices, int64_t N) {
    for (int64_t i = 0; i < N; ++i)
        if (indices[i] < 0 || indices[i] >= N) return i;
    return -1;
}

// Finds the packing of a PackedSequence as torch packs it, without Python code for its checks.
class PackingOf {
 public:
    // type: torch.Tensor. device: get_device() of the data, below 0 for the CPU. layout(sizes, N)
    // -> the layout of a packing, for the bytes of the batch sizes. make(T, N, layout,
    // sorted_indices, unsorted_indices) -> the packing.
    PackingOf(const nanobind::object &type, int64_t device, nanobind::object layout,
              nanobind::object make)
        : tensors_(type, device), layout_(std::move(layout)), make_(std::move(make)) {}

    // Returns None if a tensor has another form, a number is wrong, or the data has more rows.
    nanobind::object operator()(const nanobind::tuple &packed) const {
        namespace nb = nanobind;
        const nb::object data = packed[0], sizes = packed[1];
        kernel_runtime::View view;
        kernel_runtime::Description found;
        if (!tensors_.is_plain(data.ptr(), view, 2) || !tensors_.are_indices(sizes.ptr(), found) ||
            found.device >= 0 || !found.shape[0])
            return nb::none();
        const auto *numbers = reinterpret_cast<const int64_t *>(found.address);
        const int64_t T = found.shape[0];
        const PackedRows rows = packed_rows(numbers, T);
        if (rows.wrong >= 0 || rows.rows != view.shape[1] || !is_order(packed[2], rows.N) ||
            !is_order(packed[3], rows.N))
            return nb::none();
        const nb::bytes copy(numbers, static_cast<size_t>(T) * sizeof *numbers);
        return make_(T, rows.N, layout_(copy, rows.N), packed[2], packed[3]);
    }

 private:
    bool is_order(const nanobind::object &order, int64_t N) const {
        kernel_runtime::Description found;
        if (order.is_none()) return true;
        return tensors_.are_indices(order.ptr(), found) && found.shape[0] == N &&
               found.device == tensors_.device() &&
               (found.device >= 0 ||
                wrong_index(reinterpret_cast<const int64_t *>(found.address), N) < 0);
    }

    kernel_runtime::Tensors tensors_;
    nanobind::object layout_, make_;
};

}  // namespace quant_gru
