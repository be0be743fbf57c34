// The structural properties of a cell's plan, which select and specialize its kernels.
#pragma once

#include <array>
#include <tuple>

#include "cpu/core/cell_numbers.hpp"

namespace quant_gru::cuda {

// How kernels read a table: one entry per code in shared or global memory, quadratics, compressed.
enum TableMode : int { kDirect, kDirectGlobal, kQuadratic, kCompressed };

using Modes = std::array<int, 3>;  // of the tables of z, r and g

// The gate arithmetic of a kernel.
struct Gates {
    bool in_float = false;  // float32, otherwise float64
    Modes tables{kDirectGlobal, kDirectGlobal, kDirectGlobal};
    int table_bytes = 0;  // of shared memory

    bool operator==(const Gates &o) const {
        return std::tie(in_float, tables, table_bytes) ==
               std::tie(o.in_float, o.tables, o.table_bytes);
    }
};

struct Form {
    bool narrow = false;      // all widths are at most 16 bits, and sums fit 64 bits
    Gates gates;              // of the persistent recurrence
    bool in_int32 = false;    // it has 16-bit codes in float32, and sums R h in int32
    bool own = false;         // it needs large shared memory
    bool words = false;       // some sums need 64-bit integers
    int weight_bytes = 1;     // of a code of R
    int state_bytes = 1;      // of a state code inside a kernel
    bool wide_input = false;  // codes of W x need 16 bits
    int out_bytes = 1;        // of a state code at the interface
    bool rRh = false, old_contrib = false, new_contrib = false;  // rounded to codes
    bool zoneout = false;
    bool saturated = false;  // it may use the gates of saturating.cuh
    bool powers = false;     // multipliers of products are powers of two

    bool operator==(const Form &o) const {
        return std::tie(narrow, gates, in_int32, own, words, weight_bytes, state_bytes, wide_input,
                        out_bytes, rRh, old_contrib, new_contrib, zoneout, saturated, powers) ==
               std::tie(o.narrow, o.gates, o.in_int32, o.own, o.words, o.weight_bytes,
                        o.state_bytes, o.wide_input, o.out_bytes, o.rRh, o.old_contrib,
                        o.new_contrib, o.zoneout, o.saturated, o.powers);
    }
};

// Bytes of a code inside a kernel, by its width in bits.
constexpr int planes_of(int bits) { return bits <= 8 ? 1 : 2; }

// What is subtracted from codes so that they fit signed 8 or 16 bits.
inline int64_t byte_offset(const QuantizerNumbers &q) {
    return q.is_signed ? 0 : int64_t{1} << (q.bits <= 8 ? 7 : 15);
}

struct GateTable;

// `tables`: of z, r and g. `saturates`: whether the constants of saturating.cuh are exact.
// `large_shared`: whether the GPU has 227 KB of shared memory per block.
Form form_of(const CellNumbers &numbers, const std::array<GateTable, 3> &tables, bool saturates,
             bool large_shared);

}  // namespace quant_gru::cuda
