#include <algorithm>
#include <optional>

#include "calibration/input_mean.hpp"
#include "calibration/projection.hpp"
#include "calibration/scales.hpp"
#include "calibration/tied.hpp"
#include "passes/equations.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kValues = 1 << 16;  // values of an operator per block

bool is_calibrated(Operator op) { return !is_weight(op) && !is_fixed_range(op); }

void update(Observer &observer, const double *values, int64_t count) {
    const std::vector<float> rounded(values, values + count);
    observer.update(rounded.data(), count);
}

// The values of every operator of a block of rows, from inputs and states.
class Trace {
 public:
    Trace(const HasteCell &w, int64_t C, int64_t H)
        : W_(w.W, w.bx, C, H), R_(w.R, w.br, H, H), C_(C), H_(H) {}

    void observe(const double *x, const double *before, const double *after, int64_t rows,
                 Observers &observers) {
        W_.multiply(x, rows, Wx_);
        R_.multiply(before, rows, Rh_);
        for (auto *values : {&z_pre_, &r_pre_, &g_pre_, &rRh_, &old_, &new_})
            values->resize(static_cast<size_t>(rows * H_));
        for (int64_t i = 0; i < rows; ++i) row_of(i, before);
        const auto see = [&](Operator op, const double *values, int64_t width) {
            update(observers[static_cast<size_t>(op)], values, rows * width);
        };
        see(Operator::x, x, C_);
        see(Operator::h, after, H_);
        see(Operator::Wx, Wx_.data(), 3 * H_);
        see(Operator::Rh, Rh_.data(), 3 * H_);
        see(Operator::z_pre, z_pre_.data(), H_);
        see(Operator::r_pre, r_pre_.data(), H_);
        see(Operator::g_pre, g_pre_.data(), H_);
        see(Operator::rRh, rRh_.data(), H_);
        see(Operator::old_contrib, old_.data(), H_);
        see(Operator::new_contrib, new_.data(), H_);
    }

 private:
    void row_of(int64_t i, const double *before) {
        const double *Wx = Wx_.data() + i * 3 * H_, *Rh = Rh_.data() + i * 3 * H_;
        for (int64_t j = 0; j < H_; ++j) {
            const auto at = static_cast<size_t>(i * H_ + j);
            z_pre_[at] = Wx[j] + Rh[j];
            r_pre_[at] = Wx[H_ + j] + Rh[H_ + j];
            const double z = sigmoid(z_pre_[at]), r = sigmoid(r_pre_[at]);
            rRh_[at] = r * Rh[2 * H_ + j];
            g_pre_[at] = Wx[2 * H_ + j] + rRh_[at];
            old_[at] = z * before[i * H_ + j];
            new_[at] = (1 - z) * hyperbolic_tangent(g_pre_[at]);
        }
    }

    FloatProjection W_, R_;
    int64_t C_, H_;
    std::vector<double> Wx_, Rh_, z_pre_, r_pre_, g_pre_, rRh_, old_, new_;
};

}  // namespace

struct Calibrator::State {
    GRUShape shape;
    std::vector<FloatCell> cells;
    Method method;
    double percentile;
    std::vector<Observers> observers;
    std::vector<InputMean> means;
    std::optional<Windows> windows;  // for the method histogram

    void observe(const FloatRun &run, int64_t N) {
        auto &found = observers[run.cell];
        const int64_t H = shape.hidden_size, block = std::max<int64_t>(1, kValues / H);
        const HasteCell w(cells[run.cell], run.C, H);
        update(found[static_cast<size_t>(Operator::h)], run.states, N * H);
        means[run.cell].update(run.x, run.rows, run.C);
        Trace trace(w, run.C, H);
        for (int64_t first = 0; first < run.rows; first += block)
            trace.observe(run.x + first * run.C, run.before + first * H, run.after + first * H,
                          std::min(block, run.rows - first), found);
        for (Observer &observer : found) observer.end_batch();
    }
};

Calibrator::Calibrator(const GRUShape &shape, std::vector<FloatCell> cells, Method method,
                       double percentile)
    : state_(new State{shape, std::move(cells), method, percentile, {}, {}, {}}) {
    const auto expected = static_cast<size_t>(shape.num_layers * shape.directions());
    if (state_->cells.size() != expected)
        throw ArgumentError("Expected weights of " + std::to_string(expected) + " cells, got " +
                            std::to_string(state_->cells.size()));
    state_->means.resize(expected);
    state_->observers.resize(expected);
    for (auto &observers : state_->observers)
        for (Observer &observer : observers) observer = Observer(method, percentile);
    if (method == Method::histogram) state_->windows.emplace(shape.hidden_size);
}

Calibrator::~Calibrator() = default;
Calibrator::Calibrator(Calibrator &&) noexcept = default;
Calibrator &Calibrator::operator=(Calibrator &&) noexcept = default;

void Calibrator::collect(const float *x, int64_t T, int64_t N, const float *h0,
                         const int64_t *lengths) {
    State &s = *state_;
    const FloatInput input{x, T, N, h0, lengths};
    std::vector<std::vector<float>> starts;
    run_layers(s.shape, s.cells, input, nullptr, [&](const FloatRun &run) {
        s.observe(run, N);
        const bool reverse = s.shape.bidirectional && run.cell % 2;
        if (s.windows) starts.push_back(window_starts(input, run, s.shape.hidden_size, reverse));
    });
    if (s.windows) s.windows->add(input, s.shape.input_size, starts);
}

Parameters Calibrator::finalize(const QuantConfig &config) const {
    const State &s = *state_;
    Parameters found{s.shape, config, {}};
    Observer both(s.method, s.percentile);
    if (config.tie_x_and_h) both = tied_observer(s.observers, config, std::move(both));
    for (const Observers &observers : s.observers) {
        const bool is_first = found.cells.size() < static_cast<size_t>(s.shape.directions());
        CellParameters &cell = found.cells.emplace_back();
        cell.config = config;
        for (int i = 0; i < kOperators; ++i) {
            const auto op = static_cast<Operator>(i);
            const auto index = static_cast<size_t>(i);
            const bool tied = config.tie_x_and_h && (op == Operator::x || op == Operator::h);
            const Observer &values = tied ? both : observers[index];
            if (is_calibrated(op) && config[op].bitwidth)
                cell.quantizers[index] = values.quantizer(op, config[op], config.scale_kind);
            const bool is_input = op == Operator::x && is_first && config[op].bitwidth;
            if (!is_input || !config.input_excludes_zero || config[op].is_symmetric) continue;
            if (const auto far = values.far_quantizer(config[op], config.scale_kind))
                cell.quantizers[index] = *far;
        }
        if (config.correct_bias) cell.input_mean = s.means[found.cells.size() - 1].mean();
    }
    std::vector<CellSteps> steps;
    if (s.windows && s.windows->is_enough()) steps = steps_in(*s.windows, s.shape, s.cells);
    for (size_t i = 0; i < found.cells.size(); ++i) {
        CellParameters &cell = found.cells[i];
        if (steps.empty())
            complete(cell);
        else
            cell = searched_scales(cell, s.observers[i], steps[i], s.cells[i]);
    }
    return found;
}

}  // namespace quant_gru
