// The quantization of a GRU without its weights: quantizers and tables, and the parameter file.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "quant_gru/config.hpp"
#include "quant_gru/export.h"

namespace quant_gru {

// Real value = scale * (code - zero_point), with codes in [lo, hi]. The zero point is a code, but
// for input.x of the first layer with input_excludes_zero: the cell then computes with the nearest
// code, and the input bias contains the difference, `offset`.
struct QUANT_GRU_API ActivationQuantizer {
    int bits = 8;
    bool is_signed = true;
    double scale = 1;  // a normal float32 number
    int64_t zero_point = 0;

    int64_t lo() const { return is_signed ? -(int64_t{1} << (bits - 1)) : 0; }
    int64_t hi() const { return (int64_t{1} << (is_signed ? bits - 1 : bits)) - 1; }
    int64_t inner_zero_point() const {
        return zero_point < lo() ? lo() : zero_point > hi() ? hi() : zero_point;
    }
    double offset() const { return scale * static_cast<double>(inner_zero_point() - zero_point); }
    // V: the largest |code - inner_zero_point|.
    int64_t max_abs() const;
};

// A piecewise polynomial from input codes to output codes, docs/arithmetic.md#5-tables.
struct QUANT_GRU_API ActivationTable {
    std::vector<int64_t> bounds;
    int64_t last = 0;
    int degree = 0;
    std::vector<int64_t> coefficients;  // (segments, degree + 1)
    int shift = 0;
    int64_t zero_point = 0, lo = 0, hi = 0;
    int segment_shift = -1;  // -1 where segments have different lengths, null in the file
    Rounding rounding = Rounding::half_even;  // of the configuration; not in the file of a table

    // The output code of an input code.
    int64_t operator()(int64_t code) const;
};

// One layer and direction. The configuration is that of the cell, whose widths and kinds may differ
// from those of the GRU.
struct QUANT_GRU_API CellParameters {
    const ActivationQuantizer &quantizer(Operator op) const {
        return quantizers[static_cast<size_t>(op)];
    }
    const ActivationTable &table(Operator op) const;

    QuantConfig config;
    // Entries of weights and of fused products are not used.
    std::array<ActivationQuantizer, kOperators> quantizers;
    std::array<ActivationTable, 3> tables;  // z_out, r_out, g_out
    // Scales of weights and biases that were set by hand, rows r, z, n: 0, 1, 3 or 3H of them.
    std::array<std::vector<double>, 4> pinned;
    // The mean of each input feature, float32 numbers. The input bias is then corrected by the mean
    // error of the input weights, docs/arithmetic.md#8-scales-of-weights-and-biases. Empty without.
    std::vector<double> input_mean;
};

// The sizes and options of a float GRU, named as those of nn.GRU.
struct GRUShape {
    int64_t input_size = 1, hidden_size = 1, num_layers = 1;
    bool bias = true, bidirectional = false;
    double zoneout = 0;

    int directions() const { return bidirectional ? 2 : 1; }
};

// A parameter file: configuration, shape, scales, zero points and tables.
struct QUANT_GRU_API Parameters {
    // Reads a parameter file, or its text. Throws FileError.
    static Parameters load(const std::string &path);
    static Parameters from_text(const std::string &text, const std::string &where = "text");
    // Writes the file, with the bytes that Python writes. Throws FileError.
    void save(const std::string &path) const;
    std::string to_text() const;

    GRUShape shape;
    QuantConfig config;
    std::vector<CellParameters> cells;  // layer 0 forward, layer 0 reverse, layer 1 forward, ..
};

// Float weights of one layer and direction as PyTorch stores them: rows r, z, n (reset, update,
// candidate). W is (3H, C), R (3H, H); bw and br are (3H), null for zeros.
struct FloatCell {
    const float *W = nullptr, *R = nullptr, *bw = nullptr, *br = nullptr;
};

// The float weights of a GRU, with memory of its own.
struct QUANT_GRU_API FloatGRU {
    // Reads a safetensors file with the state_dict of nn.GRU: weight_ih_l0, weight_hh_l0,
    // bias_ih_l0, .., in float32. Throws FileError.
    static FloatGRU load(const std::string &path);
    // The default initialization of nn.GRU: uniform in +-1/sqrt(H), from a seed.
    static FloatGRU random(const GRUShape &shape, uint64_t seed);

    // Weights for Calibrator and `freeze`, valid as long as this object is not changed.
    std::vector<FloatCell> cells() const;

    GRUShape shape;
    std::vector<std::vector<float>> tensors;  // W, R, bw, br of each cell; empty without biases
};

// Quantizes the weights and returns the bytes of the file that FrozenQuantGRU.save writes in
// Python: the argument of Model::load. `cells` are in the order of Parameters::cells.
// Throws ArgumentError if a weight is not finite or there are not as many cells.
QUANT_GRU_API std::string freeze(const Parameters &parameters, const std::vector<FloatCell> &cells,
                                 bool batch_first = false);

// Biases of one cell that are cut off.
struct CutBiases {
    size_t cell = 0;               // index of Parameters::cells
    Operator bias = Operator::bw;  // or Operator::br
    int64_t count = 0;             // of its 3H biases
};

// Biases that are too large for the sums that `freeze` adds them to, because values or weights are
// very small; empty as a rule. A larger scale of Operator::x keeps those of Operator::bw, one of
// Operator::h those of Operator::br. Throws what `freeze` throws.
QUANT_GRU_API std::vector<CutBiases> cut_biases(const Parameters &parameters,
                                                const std::vector<FloatCell> &cells);

}  // namespace quant_gru
