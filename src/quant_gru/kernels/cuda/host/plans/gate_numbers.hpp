// The gate arithmetic of a cell in the forms that kernels read.
#pragma once

#include <array>
#include <optional>

#include "cuda/host/plans/cell_form.hpp"
#include "cuda/host/plans/saturating.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// Where the arrays of a table are on the GPU; 0 for what it does not have.
struct TableAddresses {
    Address direct, lines, bounds, coefficients;
};

struct GateNumbers {
    // The arrays of the numbers outlive this object. The contents of weights are not read.
    explicit GateNumbers(const CellNumbers &numbers);

    const TableNumbers &table(size_t gate) const;
    const QuantizerNumbers &pre(size_t gate) const;

    // `large_shared`: as for `form_of`.
    Form form(bool large_shared) const {
        return form_of(numbers, tables, saturated.has_value(), large_shared);
    }

    // The argument of kernels.
    template <class Real>
    CellC<Real> cell(const std::array<TableAddresses, 3> &places) const;

    CellNumbers numbers;
    GateTables tables;
    std::optional<SaturatedC> saturated;  // if the arithmetic of saturating.cuh is exact
};

}  // namespace quant_gru::cuda
