// Input projections: the launches that compute codes of W x.
#pragma once

#include <optional>

#include "cuda/host/launches.hpp"

namespace quant_gru::cuda {

// Where codes of W x go, in the order in which a recurrence reads them.
struct Projected {
    Place Wx;
    ProjectionSize size;
};

// From the real values of a call, with a warp for each unit: few rows. Writes NaN flags
// (N, flag_stride), too. Only if `projects_bytes` and `divides`.
void project_reals(Launches &to, const Cell &cell, const Projected &out, Place nan);

// The same for many rows, on tensor cores.
void project_reals_tiled(Launches &to, Cell &cell, const Projected &out, const RealBlocks &blocks,
                         Place nan);

// From codes in their container, with a warp for each unit: few rows.
void project_codes(Launches &to, const Cell &cell, const Projected &out, Place codes);

// From codes as bytes (planes, T * N, padded features), on tensor cores. Only if `projects_bytes`.
// An overlap counts finished rows of its time chunks at `counts`.
void project_bytes(Launches &to, const Cell &cell, const Projected &out, const CodeBlocks &blocks,
                   Place bytes, const std::optional<Overlap> &overlap, Place counts);

// From codes in their containers, in the way that is fastest. Returns the codes of W x.
Place project_from_codes(Launches &to, Cell &cell, const RecurrenceShape &shape, Place codes);

// From codes as bytes for all weights of up to 16 bits, by products of bytes. Only if `sums_fit`.
void project_by_products(Launches &to, Cell &cell, const Projected &out, Place bytes);

}  // namespace quant_gru::cuda
