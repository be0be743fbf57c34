// The configuration of a quantized GRU: gru_quant_bitwidth_config.json.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "quant_gru/export.h"

namespace quant_gru {

// The seventeen operators, in the order of the file.
enum class Operator : int {
    x,
    h,
    W,
    R,
    bw,
    br,
    Wx,
    Rh,
    z_pre,
    z_out,
    r_pre,
    r_out,
    g_pre,
    g_out,
    rRh,
    old_contrib,
    new_contrib
};
constexpr int kOperators = 17;

// The full name, such as "gate.z_out".
QUANT_GRU_API const char *name_of(Operator op);
// The operator of a full, short or older name. Throws ArgumentError.
QUANT_GRU_API Operator operator_of(const std::string &name);

constexpr bool is_weight(Operator op) { return op >= Operator::W && op <= Operator::br; }
constexpr bool is_fusible(Operator op) { return op >= Operator::rRh; }
constexpr bool is_sigmoid(Operator op) { return op == Operator::z_out || op == Operator::r_out; }
// Outputs of sigmoid and tanh, whose scales follow from the range of the function.
constexpr bool is_fixed_range(Operator op) { return is_sigmoid(op) || op == Operator::g_out; }

enum class ScaleKind { pot, free };
enum class Activation { exact, pwl, quadratic };
enum class Granularity { tensor, gate, channel };
// How sums become integers. `twice`, "double" in the file: in the two steps of TFLite.
enum class Rounding { half_even, half_away, half_up, floor, twice };

// The texts of a section of the file, which reading and writing preserve.
struct Notes {
    std::optional<std::string> description, comment;
};

// The fields of one operator; docs/configuration.md describes them.
struct OperatorConfig {
    int bitwidth = 8;  // 1 to 32; 0 for a fused product, null in the file
    bool is_symmetric = true, is_unsigned = false;
    Granularity granularity = Granularity::channel;  // of weights and biases
    Notes notes;
};

// A bit-width configuration, the file of docs/configuration.md.
struct QUANT_GRU_API QuantConfig {
    // 8 bits, symmetric, signed; sigmoid outputs unsigned.
    QuantConfig();

    // The presets of Python. `uniform` has one width everywhere.
    static QuantConfig uniform(int bitwidth, bool is_symmetric = true);
    static QuantConfig int8() { return uniform(8, false); }
    static QuantConfig int16() { return uniform(16, false); }
    static QuantConfig w8a16();
    static QuantConfig int8_wide();

    // Reads the file, or its text. Throws FileError, which lists every problem.
    static QuantConfig from_json(const std::string &path);
    static QuantConfig from_text(const std::string &text, const std::string &where = "text");
    // Writes the complete file, as Python does. Throws FileError.
    void to_json(const std::string &path) const;
    std::string to_text() const;

    OperatorConfig &operator[](Operator op) { return operators[static_cast<size_t>(op)]; }
    const OperatorConfig &operator[](Operator op) const {
        return operators[static_cast<size_t>(op)];
    }

    // The rule of real values, including the default: `half_away` beside `twice`.
    Rounding border_rounding() const {
        if (rounding_input) return *rounding_input;
        return rounding == Rounding::twice ? Rounding::half_away : rounding;
    }

    std::array<OperatorConfig, kOperators> operators;
    ScaleKind scale_kind = ScaleKind::pot;
    Activation activation = Activation::exact;
    int segments = 0;  // pieces of a pwl or quadratic table; 0 for the default, null in the file
    bool correct_bias = true;  // calibration keeps the mean of the input, see CellParameters
    bool input_excludes_zero = false;  // the range of input.x of the first layer may exclude 0
    bool tie_x_and_h = false;          // calibration gives input.x and output.h one quantizer
    Rounding rounding = Rounding::half_even;
    std::optional<Rounding> rounding_input;  // of real values, not `twice`; without: as `rounding`
    bool disable_quantization = false;
    Notes notes, gru_notes, default_notes, operator_notes;
};

}  // namespace quant_gru
