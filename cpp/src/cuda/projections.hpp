// Input projections: the launches that compute codes of W x.
#pragma once

#include "cuda/call.hpp"

namespace quant_gru::cuda {

// Where codes of W x go, in the order in which a recurrence reads them.
struct Projected {
    Address Wx;
    int64_t strip, strips;  // rows of a strip, and strips of all rows of a step
    int64_t units;          // padded to groups of 16
};

constexpr int64_t padded_features(int64_t features) { return (features + 15) / 16 * 16; }

// Whether the kernels' division by a scale without branches gives exact codes of up to 16 bits.
bool divides(const QuantizerNumbers &x);
DivisionC division_of(const QuantizerNumbers &x);

// From the real values of a call, with a warp for each unit: few rows. Writes NaN flags
// (N, flag_stride), too. Only if `projects_bytes` and `divides`.
void project_reals(Launches &to, const Cell &cell, const Projected &out, Address nan);

// From codes in their container, with a warp for each unit: few rows.
void project_codes(Launches &to, const Cell &cell, const Projected &out, Address codes);

// From codes as bytes (planes, T * N, padded features), on tensor cores. Only if `projects_bytes`.
void project_bytes(Launches &to, const Cell &cell, const Projected &out, Address bytes);

// The same for all weights of up to 16 bits, by products of bytes. Only if `sums_fit`.
void project_by_products(Launches &to, Cell &cell, const Projected &out, Address bytes);

}  // namespace quant_gru::cuda
