#include "calibration/scales.hpp"

#include <algorithm>

#include "calibration/search.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// Rounding to wider codes is finer than the float values that the search compares.
constexpr int kWidest = 16;
// A later set must be better than the first one by this much, about 0.1 dB.
constexpr double kBetter = 0.98;

// In the order of `Quantized`.
constexpr Operator kSearched[] = {Operator::Wx,          Operator::Rh,          Operator::z_pre,
                                  Operator::r_pre,       Operator::g_pre,       Operator::rRh,
                                  Operator::old_contrib, Operator::new_contrib, Operator::h};

// Quantizers of the operators that the search chooses.
std::vector<std::pair<Operator, ActivationQuantizer>> effective_quantizers(
    const QuantConfig &config, const Observers &observers, const CellSteps &steps) {
    Effects effects({steps.H, steps.batch_sizes, steps.reverse, steps.Wx.data(), steps.Rh.data(),
                     steps.before.data()});
    std::vector<std::pair<Operator, ActivationQuantizer>> found;
    for (size_t i = 0; i < std::size(kSearched); ++i) {
        const Operator op = kSearched[i];
        const OperatorConfig &form = config[op];
        if (!form.bitwidth || form.bitwidth > kWidest) continue;
        if (config.tie_x_and_h && op == Operator::h) continue;
        const Observer &observer = observers[static_cast<size_t>(op)];
        const Codes codes =
            codes_of(observer.minimum(), observer.maximum(), form, config.scale_kind);
        if (codes.low == codes.high) continue;
        const Choice choice = effects.choose(static_cast<Quantized>(i), codes);
        if (choice.found)
            found.push_back({op,
                             {form.bitwidth, !form.is_unsigned, choice.scale,
                              static_cast<int64_t>(choice.zero_point)}});
    }
    return found;
}

// Whether the quantizers of all searched operators are equal.
bool same(const CellParameters &a, const CellParameters &b) {
    return std::all_of(std::begin(kSearched), std::end(kSearched), [&](Operator op) {
        const ActivationQuantizer &x = a.quantizer(op), &y = b.quantizer(op);
        return x.scale == y.scale && x.zero_point == y.zero_point;
    });
}

// The summed squared error of the states of the integer cell.
double error(const CellParameters &cell, const CellSteps &steps, const FloatCell &weights) {
    const int64_t C = steps.C, H = steps.H, N = steps.batch_sizes[0];
    const auto T = static_cast<int64_t>(steps.batch_sizes.size());
    std::vector<float> x(static_cast<size_t>(T * N * C)), h0(static_cast<size_t>(N * H)),
        y(static_cast<size_t>(T * N * H));
    const auto each_step = [&](auto f) {
        for (int64_t n = 0; n < N; ++n)
            for (int64_t i = 0; i < steps.lengths[static_cast<size_t>(n)]; ++i)
                f(i, n, steps.row(i, n));
    };
    each_step([&](int64_t i, int64_t n, int64_t row) {
        std::copy_n(steps.x.begin() + row * C, C, x.begin() + (i * N + n) * C);
        if (i == 0) std::copy_n(steps.before.begin() + row * H, H, h0.begin() + n * H);
    });
    GRUShape shape;
    shape.input_size = C;
    shape.hidden_size = H;
    shape.bias = weights.bw != nullptr;
    const std::string file = freeze({shape, cell.config, {cell}}, {weights});
    RunOptions options;
    options.h0 = h0.data();
    options.lengths = steps.lengths.data();
    Model::load(file.data(), file.size()).run(x.data(), T, N, y.data(), options);
    double total = 0;
    each_step([&](int64_t i, int64_t n, int64_t row) {
        const float *found = y.data() + (i * N + n) * H, *wanted = steps.after.data() + row * H;
        for (int64_t j = 0; j < H; ++j) {
            const double d = static_cast<double>(found[j]) - static_cast<double>(wanted[j]);
            total += d * d;
        }
    });
    return total;
}

}  // namespace

void complete(CellParameters &cell) {
    set_fixed_ranges(cell);
    build_tables(cell);
}

CellParameters searched_scales(const CellParameters &plain, const Observers &observers,
                               const CellSteps &steps, const FloatCell &weights) {
    const QuantConfig &config = plain.config;
    CellParameters effective = plain, covering = plain;
    for (const auto &[op, quantizer] : effective_quantizers(config, observers, steps)) {
        const auto index = static_cast<size_t>(op);
        const Observer &observer = observers[index];
        effective.quantizers[index] = quantizer;
        covering.quantizers[index] = covering_quantizer(observer.minimum(), observer.maximum(),
                                                        config[op], config.scale_kind);
    }
    std::vector<CellParameters> sets;  // the preferred ones first
    for (const CellParameters *each : {&std::as_const(effective), &plain, &std::as_const(covering)})
        if (std::none_of(sets.begin(), sets.end(),
                         [&](const CellParameters &other) { return same(*each, other); }))
            sets.push_back(*each);
    for (CellParameters &each : sets) complete(each);
    if (sets.size() == 1) return sets[0];
    size_t best = 0;
    double least = error(sets[0], steps, weights);
    for (size_t i = 1; i < sets.size(); ++i) {
        const double found = error(sets[i], steps, weights);
        if (found >= kBetter * least) continue;
        best = i;
        least = found;
    }
    return sets[best];
}

}  // namespace quant_gru
