// Real values at the boundary of a call: of any dtype and strides, or the rows of a packed
// sequence. Kernels compute with float32 values (T, N, n) whose features are contiguous.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/core/memory.hpp"

namespace quant_gru {

enum class Real : int { float32, float16, bfloat16, float64 };

// Values (T, N, n), or states (cells, N, n), in the caller's memory.
struct RealValues {
    void *data = nullptr;  // null: absent
    Real kind = Real::float32;
    int64_t step = 0, row = 0, feature = 1;  // strides in elements
    // Packed rows: step t has the rows starts[t] .. starts[t + 1], and `step` is not used.
    const int64_t *starts = nullptr;
    // Row n of the copy is row order[n] of the original; null: rows keep their order.
    const int64_t *order = nullptr;

    static RealValues contiguous(void *data, Real kind, int64_t N, int64_t n) {
        return {data, kind, N * n, n, 1, nullptr, nullptr};
    }
    // Whether kernels can use the memory itself.
    bool is_plain() const { return kind == Real::float32 && feature == 1 && !starts && !order; }
    bool is_contiguous(int64_t N, int64_t n) const {
        return is_plain() && row == n && step == N * n;
    }
};

// Copies to contiguous memory. Rows that a packed sequence lacks become 0.
void read(const RealValues &from, int64_t T, int64_t N, int64_t n, float *to);
// Copies from contiguous memory, rounding half to even.
void write(const float *from, int64_t T, int64_t N, int64_t n, const RealValues &to);

// Values for kernels to read: the caller's memory if it is plain, otherwise a copy.
struct Readable {
    // contiguous: whether plain values with other strides are copied, too.
    Readable(const RealValues &from, int64_t T, int64_t N, int64_t n, bool contiguous = false);
    const float *data;  // null if the values are absent
    int64_t step, row;

 private:
    std::unique_ptr<Aligned> own_;
};

// Contiguous memory for kernels to write: the caller's if possible, otherwise a buffer that
// `finish` copies to it.
struct Writable {
    Writable(const RealValues &to, int64_t T, int64_t N, int64_t n);
    void finish() const;
    float *data;  // null if the values are absent

 private:
    RealValues to_;
    int64_t T_, N_, n_;
    std::unique_ptr<Aligned> own_;
};

}  // namespace quant_gru
