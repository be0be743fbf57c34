// Input projections: the launches that compute codes of W x.
#pragma once

#include "cuda/host/call.hpp"

namespace quant_gru::cuda {

// Where codes of W x go, in the order in which a recurrence reads them.
struct Projected {
    Address Wx;
    int64_t rows;           // of a tile of the recurrence
    int64_t strip, strips;  // rows of a strip, and strips of all rows of a step
    int64_t units;          // padded to groups of 16
};

enum class Projection { reals_few, reals_tiled, codes_few, bytes, products };

constexpr bool reads_reals(Projection method) {
    return method == Projection::reals_few || method == Projection::reals_tiled;
}

// The projection that measured fastest, as the Python package selects it.
Projection select_projection(const Launches &to, const Cell &cell, const Projected &out,
                             bool real_values);

constexpr int64_t padded_features(int64_t features) { return (features + 15) / 16 * 16; }

// Whether the kernels' division by a scale without branches gives exact codes of up to 16 bits.
bool divides(const QuantizerNumbers &x);
DivisionC division_of(const QuantizerNumbers &x);

// From the real values of a call, with a warp for each unit: few rows. Writes NaN flags
// (N, flag_stride), too. Only if `projects_bytes` and `divides`.
void project_reals(Launches &to, const Cell &cell, const Projected &out, Address nan);

// From codes in their container, with a warp for each unit: few rows.
void project_codes(Launches &to, const Cell &cell, const Projected &out, Address codes);

// The same for many rows, on tensor cores.
void project_reals_tiled(Launches &to, Cell &cell, const Projected &out, Address nan);

// Whether blocks exist for which that is faster than a projection from codes.
bool has_real_blocks(const Launches &to, const Cell &cell, const Projected &out);

// What epilogue.cuh reads, and the macros that specialize it.
ProjectedC epilogue_of(const Launches &to, const Cell &cell, const Projected &out);
Macros epilogue_macros(const Cell &cell);
bool is_power(float scale);

// From codes as bytes (planes, T * N, padded features), in tiles. Only if `projects_bytes`.
void project_bytes(Launches &to, const Cell &cell, const Projected &out, Address bytes);

// The same for all weights of up to 16 bits, by products of bytes. Only if `sums_fit`.
void project_by_products(Launches &to, Cell &cell, const Projected &out, Address bytes);

}  // namespace quant_gru::cuda
