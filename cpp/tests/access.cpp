// The library for tests from Python, by ctypes. The passes are in access_passes.cpp.
#include "access.hpp"

#include <string>
#include <vector>

#include "plan/tables.hpp"
#include "plan/weighted_sum.hpp"
#include "quant_gru/calibration.hpp"
#include "quant_gru/model.hpp"

using namespace quant_gru;

std::string kept;

namespace {

GRUShape shape_of(const int64_t *numbers, double zoneout) {
    GRUShape shape;
    shape.input_size = numbers[0];
    shape.hidden_size = numbers[1];
    shape.num_layers = numbers[2];
    shape.bias = numbers[3] != 0;
    shape.bidirectional = numbers[4] != 0;
    shape.zoneout = zoneout;
    return shape;
}

std::vector<FloatCell> cells_of(const float *const *weights, int64_t count) {
    std::vector<FloatCell> cells;
    for (int64_t i = 0; i < count; ++i, weights += 4)
        cells.push_back({weights[0], weights[1], weights[2], weights[3]});
    return cells;
}

}  // namespace

extern "C" {

const char *result() { return kept.data(); }

// Reads a configuration and writes it.
int64_t config_text(const char *text) {
    return answer([&] { return QuantConfig::from_text(text, "text").to_text(); });
}

// Reads a parameter document and writes it.
int64_t parameters_text(const char *text) {
    return answer([&] { return Parameters::from_text(text, "text").to_text(); });
}

// weights: W, R, bw, br of each cell.
int64_t frozen_bytes(const char *parameters, const float *const *weights, int64_t cells,
                     int batch_first) {
    return answer([&] {
        return freeze(Parameters::from_text(parameters), cells_of(weights, cells), batch_first);
    });
}

// weights: as above. Three numbers for each cut: cell, 1 for the biases of R, count.
int64_t cut_numbers(const char *parameters, const float *const *weights, int64_t cells) {
    return answer([&] {
        std::vector<int64_t> words;
        for (const CutBiases &cut :
             cut_biases(Parameters::from_text(parameters), cells_of(weights, cells)))
            words.insert(words.end(),
                         {static_cast<int64_t>(cut.cell), cut.bias == Operator::br, cut.count});
        return std::string(reinterpret_cast<const char *>(words.data()),
                           words.size() * sizeof(int64_t));
    });
}

// batches: x of each; sizes: T and N of each; lengths: of each, or null.
int64_t calibrated(const char *config, const int64_t *shape, double zoneout,
                   const float *const *weights, int64_t cells, const char *method,
                   double percentile, int64_t count, const float *const *batches,
                   const int64_t *sizes, const float *const *h0, const int64_t *const *lengths) {
    return answer([&] {
        Calibrator calibrator(shape_of(shape, zoneout), cells_of(weights, cells), method_of(method),
                              percentile);
        for (int64_t i = 0; i < count; ++i)
            calibrator.collect(batches[i], sizes[2 * i], sizes[2 * i + 1], h0[i], lengths[i]);
        return calibrator.finalize(QuantConfig::from_text(config)).to_text();
    });
}

// The quantizer of an operator after batches of values: its zero point, and its scale in `scale`.
int64_t observed(const char *method, double percentile, int64_t count, const float *const *batches,
                 const int64_t *sizes, int bits, int symmetric, int is_unsigned, int free_scale,
                 double *scale, int64_t *zero) {
    return answer([&] {
        Observer first(method_of(method), percentile), second(method_of(method), percentile);
        for (int64_t i = 0; i < count; ++i) {
            // half of the batches go through a merge
            Observer &to = i % 2 && std::string(method) != "ema" ? second : first;
            to.update(batches[i], sizes[i]);
            to.end_batch();
        }
        first.merge(second);
        OperatorConfig config;
        config.bitwidth = bits;
        config.is_symmetric = symmetric != 0;
        config.is_unsigned = is_unsigned != 0;
        const auto q =
            first.quantizer(Operator::x, config, free_scale ? ScaleKind::free : ScaleKind::pot);
        *scale = q.scale;
        *zero = q.zero_point;
        return std::string();
    });
}

// The shift, and the multiplier of each of two terms with 128-bit bounds (low, high).
int two_terms(const double *ratios, const uint64_t *bounds, int bits, int pot, int64_t *M) {
    std::vector<SumTerm> terms;
    for (int i = 0; i < 2; ++i)
        terms.push_back(
            {ratios[i], static_cast<unsigned __int128>(bounds[2 * i + 1]) << 64 | bounds[2 * i]});
    const Multipliers found = several_terms(terms, bits, pot != 0);
    M[0] = found.M[0];
    M[1] = found.M[1];
    return found.k;
}

// The table of an operator between quantizers (bits, signed, zero point; scale), as int64 words:
// degree, last, shift, zero point, lo, hi, segment shift, then bounds and coefficients.
int64_t table_words(const char *op, const int64_t *pre, double pre_scale, const int64_t *out,
                    double out_scale, int activation, int segments) {
    return answer([&] {
        const ActivationQuantizer from{static_cast<int>(pre[0]), pre[1] != 0, pre_scale, pre[2]};
        const ActivationQuantizer to{static_cast<int>(out[0]), out[1] != 0, out_scale, out[2]};
        const ActivationTable t =
            build_table(operator_of(op), from, to, static_cast<Activation>(activation), segments,
                        Rounding::half_even);
        std::vector<int64_t> words = {t.degree, t.last, t.shift,        t.zero_point,
                                      t.lo,     t.hi,   t.segment_shift};
        words.insert(words.end(), t.bounds.begin(), t.bounds.end());
        words.insert(words.end(), t.coefficients.begin(), t.coefficients.end());
        return std::string(reinterpret_cast<const char *>(words.data()),
                           words.size() * sizeof(int64_t));
    });
}

void float_gru(const int64_t *shape, const float *const *weights, int64_t cells, const float *x,
               int64_t T, int64_t N, float *y, float *h_n, const float *h0,
               const int64_t *lengths) {
    run_float(shape_of(shape, 0), cells_of(weights, cells), x, T, N, y, h_n, h0, lengths);
}

}  // extern "C"
