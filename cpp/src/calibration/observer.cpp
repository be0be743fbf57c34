#include <cmath>
#include <limits>
#include <optional>

#include "calibration/search.hpp"
#include "json_writer.hpp"
#include "quant_gru/calibration.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr double kDecay = 0.9, kInfinity = std::numeric_limits<double>::infinity();

struct Range {
    double minimum = kInfinity, maximum = -kInfinity;

    bool is_empty() const { return minimum > maximum; }
    void cover(const Range &other) {
        minimum = std::min(minimum, other.minimum);
        maximum = std::max(maximum, other.maximum);
    }
};

const char *const kMethods[] = {"histogram", "minmax", "percentile", "ema"};

}  // namespace

Method method_of(const std::string &name) {
    for (int i = 0; i < 4; ++i)
        if (name == kMethods[i] || (i == 0 && name == "sqnr")) return static_cast<Method>(i);
    throw ArgumentError(
        "Expected method to be one of histogram, sqnr, minmax, percentile, ema, "
        "got '" +
        name + "'");
}

struct Observer::State {
    void add(const Histogram &other) { histogram = histogram ? merged(*histogram, other) : other; }

    // The range that the method covers.
    Range covered() const {
        if (method != Method::percentile) return range;
        const auto [low, high] = central_range(*histogram, percentile);
        return {low, high};
    }

    Method method;
    double percentile;
    int64_t nonfinite = 0;
    std::optional<Histogram> histogram;
    Range range, batch;
};

Observer::Observer(Method method, double percentile)
    : state_(new State{method, percentile, 0, {}, {}, {}}) {
    if (!(percentile > 50 && percentile <= 100))
        throw ArgumentError("Expected percentile to be in (50, 100], got " + shortest(percentile));
}

Observer::~Observer() = default;
Observer::Observer(Observer &&) noexcept = default;
Observer &Observer::operator=(Observer &&) noexcept = default;

void Observer::update(const float *values, int64_t count) {
    Range found;
    std::vector<float> finite;
    bool all_finite = true;
    for (int64_t i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) {
            ++state_->nonfinite;
            all_finite = false;
            continue;
        }
        const auto value = static_cast<double>(values[i]) + 0.0;  // -0 becomes 0
        found.cover({value, value});
    }
    if (found.is_empty()) return;
    if (!all_finite) {
        for (int64_t i = 0; i < count; ++i)
            if (std::isfinite(values[i])) finite.push_back(values[i]);
        values = finite.data();
        count = static_cast<int64_t>(finite.size());
    }
    (state_->method == Method::ema ? state_->batch : state_->range).cover(found);
    if (state_->method == Method::histogram || state_->method == Method::percentile)
        state_->add(histogram_of(values, count, found.minimum, found.maximum));
}

void Observer::end_batch() {
    const Range batch = state_->batch;
    Range &average = state_->range;
    state_->batch = {};
    if (batch.is_empty()) return;
    if (average.is_empty()) {
        average = batch;
        return;
    }
    average.minimum = kDecay * average.minimum + (1 - kDecay) * batch.minimum;
    average.maximum = kDecay * average.maximum + (1 - kDecay) * batch.maximum;
}

void Observer::merge(const Observer &other) {
    const State &from = *other.state_;
    if (from.method != state_->method || from.percentile != state_->percentile)
        throw ArgumentError(
            "Expected the observer to merge to be of the same method and "
            "percentile, got " +
            std::string(kMethods[static_cast<int>(from.method)]) + ", " +
            shortest(from.percentile));
    state_->nonfinite += from.nonfinite;
    state_->range.cover(from.range);
    state_->batch.cover(from.batch);
    if (from.histogram) state_->add(*from.histogram);
}

int64_t Observer::nonfinite() const { return state_->nonfinite; }
double Observer::minimum() const { return state_->range.minimum; }
double Observer::maximum() const { return state_->range.maximum; }

ActivationQuantizer Observer::quantizer(Operator op, const OperatorConfig &config,
                                        ScaleKind kind) const {
    const std::string place = " (operator '" + std::string(name_of(op)) + "')";
    if (state_->nonfinite)
        throw ArgumentError("Expected values to be finite during calibration, got " +
                            std::to_string(state_->nonfinite) + " NaN or infinite" + place);
    if (state_->range.is_empty())
        throw ArgumentError("Expected statistics of at least one value, got none" + place);
    if (state_->method == Method::histogram)
        return least_squares_quantizer(*state_->histogram, config, kind);
    const Range range = state_->covered();
    return covering_quantizer(range.minimum, range.maximum, config, kind);
}

std::optional<ActivationQuantizer> Observer::far_quantizer(const OperatorConfig &config,
                                                           ScaleKind kind) const {
    const Range range = state_->covered();
    const bool searches = state_->method == Method::histogram;
    return quant_gru::far_quantizer(range.minimum, range.maximum,
                                    searches ? &*state_->histogram : nullptr, config, kind);
}

}  // namespace quant_gru
