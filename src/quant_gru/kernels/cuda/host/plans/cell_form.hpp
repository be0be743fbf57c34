// The structural properties of a cell's plan, which select and specialize its kernels.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/core/cell_numbers.hpp"
#include "cuda/host/plans/gate_tables.hpp"

namespace quant_gru::cuda {

using Macros = std::map<std::string, std::string>;

constexpr int64_t kMagicFloat = 12582912;  // Magic<float>::number() in gates/arithmetic.cuh

// Whether products with a multiplier stay normal in float32.
inline bool is_normal(double m) { return m == 0 || (m > 1e-20 && m < 1e20); }

// For kernels that include the header of the gate arithmetic without using it.
extern const Macros kPlain;

// The rules of sums and of real values, see fixed_point.h. Ties to even have no macros.
struct Rules {
    int sums = QG_HALF_EVEN, input = QG_HALF_EVEN;

    Macros macros() const;
    bool operator==(const Rules &o) const { return sums == o.sums && input == o.input; }
};

inline Rules rules_of(const CellNumbers &numbers) {
    return {numbers.rounding, numbers.rounding_input};
}

// kPlain and the rules of a plan.
Macros plain_of(const CellNumbers &numbers);

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
    // Whether all widths are at most 16 bits, sums fit 64 bits, and they are rounded in one step.
    bool narrow = false;
    Gates gates;               // of all kernels
    std::optional<Gates> own;  // of the persistent recurrence, if others need less shared memory
    bool words = false;        // some sums need 64-bit integers
    int weight_bytes = 1;      // of a code of R
    int state_bytes = 1;       // of a state code inside a kernel
    bool wide_input = false;   // codes of W x need 16 bits
    int out_bytes = 1;         // of a state code at the interface
    bool rRh = false, old_contrib = false, new_contrib = false;  // rounded to codes
    bool zoneout = false;
    bool saturated = false;  // the recurrence may use the gates of saturating.cuh
    bool powers = false;     // multipliers of products are powers of two
    Rules rules{};

    // The gate arithmetic of the persistent recurrence.
    const Gates &recurrence() const { return own ? *own : gates; }
    // Whether the persistent recurrence has 16-bit codes in float32 and sums R h in int32.
    bool in_int32() const { return recurrence().in_float != gates.in_float; }
    // Which products are rounded to codes, whether zoneout is on, and the rules.
    Macros products() const;
    // Equal except for the gate arithmetic, every choice of which is exact.
    bool has_structure_of(const Form &other) const { return structure() == other.structure(); }
    bool operator==(const Form &o) const {
        return structure() == o.structure() &&
               std::tie(gates, own, words, saturated, powers) ==
                   std::tie(o.gates, o.own, o.words, o.saturated, o.powers);
    }

 private:
    std::tuple<bool, int, int, bool, int, bool, bool, bool, bool, int, int> structure() const {
        return {narrow,      weight_bytes, state_bytes, wide_input, out_bytes,  rRh,
                old_contrib, new_contrib,  zoneout,     rules.sums, rules.input};
    }
};

// Bytes of a code inside a kernel, by its width in bits.
constexpr int planes_of(int bits) { return bits <= 8 ? 1 : 2; }

// What is subtracted from codes so that they fit signed 8 or 16 bits.
inline int64_t byte_offset(const QuantizerNumbers &q) {
    return q.is_signed ? 0 : int64_t{1} << (q.bits <= 8 ? 7 : 15);
}

// `tables`: of z, r and g. `saturates`: whether the constants of saturating.cuh are exact.
// `large_shared`: whether the GPU has 227 KB of shared memory per block. The contents of weights
// are not read.
Form form_of(const CellNumbers &numbers, const GateTables &tables, bool saturates,
             bool large_shared);

// The form of a launch for the directions of a layer, whose gate arithmetic is exact for all of
// them; nothing if their structures differ. Equal forms are returned as they are.
struct DirectionForm {
    Form form;
    const GateTables &tables;
};
std::optional<Form> joint_form(const std::vector<DirectionForm> &directions);

}  // namespace quant_gru::cuda
