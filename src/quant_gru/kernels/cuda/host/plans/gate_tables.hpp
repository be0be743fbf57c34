// The tables of the gates in the forms that kernels read.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cpu/core/cell_numbers.hpp"

namespace quant_gru::cuda {

constexpr int kNarrowBits = 16;
constexpr int kExactBits = 12;           // up to this input width a table has one entry per code
constexpr int64_t kFractionCodes = 256;  // see saturating.cuh

// How kernels read a table: one entry per code in shared or global memory, quadratics, compressed.
enum TableMode : int { kDirect, kDirectGlobal, kQuadratic, kCompressed };

// One table. Zero points are subtracted from all codes.
struct GateTable {
    int mode = 0;                // how float64 arithmetic reads it
    int near = 0;                // the same on GPUs with large shared memory
    int64_t first = 0;           // input code of the first entry
    std::vector<float> direct;   // output codes; empty with inputs beyond 16 bits
    std::vector<int32_t> lines;  // see compressed_table.cuh, two words per line; or empty
    int64_t line_origin = 0;     // input code of the first line
    int64_t segments = 0;

    // Bytes of shared memory if it is read in a mode. They do not depend on the first code.
    int shared_bytes(int how) const;
};

using GateTables = std::array<GateTable, 3>;  // of z, r and g

GateTable gate_table(const TableNumbers &table, const QuantizerNumbers &pre, int rule);

// The largest even code that is at most the smallest input code: the first entry of a table of
// up to 256 codes.
inline int64_t first_entry(const QuantizerNumbers &pre) {
    const int64_t lo = pre.lo() - pre.zero;
    return lo - (lo % 2 != 0);
}

// Compresses outputs, whose number is a multiple of 32, to lines of 16 codes. Returns two words
// per line, or nothing if the table is too curved or has a descending segment.
std::vector<int32_t> compressed(const std::vector<int64_t> &outputs);

}  // namespace quant_gru::cuda
