// From real data to scales: observers, and the calibration of a whole GRU.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quant_gru/export.h"
#include "quant_gru/parameters.hpp"

namespace quant_gru {

// histogram: least squared error, of the states in a Calibrator and of the values in an Observer.
// minmax: covers all values. percentile: covers a central range. ema: covers moving averages of the
// extremes of batches.
enum class Method { histogram, minmax, percentile, ema };

// The method of a name, "sqnr" for histogram included. Throws ArgumentError.
QUANT_GRU_API Method method_of(const std::string &name);

// Statistics of the values of one operator. Their order does not matter, except for ema.
class QUANT_GRU_API Observer {
 public:
    // percentile: the share to cover in percent, in (50, 100]. Throws ArgumentError.
    explicit Observer(Method method = Method::histogram, double percentile = 99.99);
    ~Observer();
    Observer(Observer &&) noexcept;
    Observer &operator=(Observer &&) noexcept;

    void update(const float *values, int64_t count);
    // Marks the end of a batch; only ema uses it.
    void end_batch();
    // Adds the statistics of an observer of the same method. Throws ArgumentError.
    void merge(const Observer &other);

    // Values that are NaN or infinite; the other statistics exclude them.
    int64_t nonfinite() const;
    // The observed range; minimum > maximum while there are no values.
    double minimum() const;
    double maximum() const;

    // The quantizer of an operator from these statistics. Throws ArgumentError if there are none,
    // or a value was not finite.
    ActivationQuantizer quantizer(Operator op, const OperatorConfig &config, ScaleKind kind) const;
    // The asymmetric quantizer of a range that excludes 0, whose zero point may be no code; empty
    // if the range includes 0, or has no such quantizer. `quantizer` must not throw.
    std::optional<ActivationQuantizer> far_quantizer(const OperatorConfig &config,
                                                     ScaleKind kind) const;

 private:
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// Runs the float GRU on batches, and observes every operator of all layers and directions.
class QUANT_GRU_API Calibrator {
 public:
    // The weights must live as long as the calibrator. Throws ArgumentError.
    Calibrator(const GRUShape &shape, std::vector<FloatCell> cells,
               Method method = Method::histogram, double percentile = 99.99);
    ~Calibrator();
    Calibrator(Calibrator &&) noexcept;
    Calibrator &operator=(Calibrator &&) noexcept;

    // x: (T, N, C). h0: (layers * directions, N, H), null for zeros. lengths: (N), steps of each
    // sequence, 1..T, null if all have T. Throws ArgumentError.
    void collect(const float *x, int64_t T, int64_t N, const float *h0 = nullptr,
                 const int64_t *lengths = nullptr);

    // Scales and tables from everything collected so far. Throws ArgumentError.
    Parameters finalize(const QuantConfig &config) const;

 private:
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// The float GRU: y (T, N, directions * H), h_n (layers * directions, N, H) or null. The other
// arguments are those of Calibrator::collect. Steps beyond a length are 0 in y.
QUANT_GRU_API void run_float(const GRUShape &shape, const std::vector<FloatCell> &cells,
                             const float *x, int64_t T, int64_t N, float *y, float *h_n = nullptr,
                             const float *h0 = nullptr, const int64_t *lengths = nullptr);

}  // namespace quant_gru
