#include <algorithm>
#include <array>

#include "calibration/float_gru.hpp"
#include "calibration/input_mean.hpp"
#include "calibration/tied.hpp"
#include "passes/equations.hpp"
#include "passes/gemm.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/calibration.hpp"
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
    Trace(const HasteCell &w, int64_t C, int64_t H) : w_(w), C_(C), H_(H) {
        W_.resize(C, 3 * H);
        W_.pack(w.W.data(), 0, 1);
        R_.resize(H, 3 * H);
        R_.pack(w.R.data(), 0, 1);
    }

    void observe(const double *x, const double *before, const double *after, int64_t rows,
                 std::array<Observer, kOperators> &observers) {
        project(W_, x, C_, w_.bx, rows, Wx_);
        project(R_, before, H_, w_.br, rows, Rh_);
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
    void project(const PackedMatrix<double> &weights, const double *from, int64_t K,
                 const std::vector<double> &bias, int64_t rows, std::vector<double> &to) const {
        to.resize(static_cast<size_t>(rows * 3 * H_));
        weights.multiply({from, K, 1}, 0, rows, to.data(), false);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < 3 * H_; ++c)
                to[static_cast<size_t>(i * 3 * H_ + c)] += bias[static_cast<size_t>(c)];
    }

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

    const HasteCell &w_;
    int64_t C_, H_;
    PackedMatrix<double> W_, R_;
    std::vector<double> Wx_, Rh_, z_pre_, r_pre_, g_pre_, rRh_, old_, new_;
};

}  // namespace

struct Calibrator::State {
    GRUShape shape;
    std::vector<FloatCell> cells;
    Method method;
    double percentile;
    std::vector<std::array<Observer, kOperators>> observers;
    std::vector<InputMean> means;

    void observe(const FloatRun &run, int64_t N) {
        auto &found = observers[run.cell];
        const int64_t H = shape.hidden_size, block = std::max<int64_t>(1, kValues / H);
        const HasteCell w(cells[run.cell], run.C, H);
        update(found[static_cast<size_t>(Operator::h)], run.h0, N * H);
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
    : state_(new State{shape, std::move(cells), method, percentile, {}, {}}) {
    const auto expected = static_cast<size_t>(shape.num_layers * shape.directions());
    if (state_->cells.size() != expected)
        throw ArgumentError("Expected weights of " + std::to_string(expected) + " cells, got " +
                            std::to_string(state_->cells.size()));
    state_->means.resize(expected);
    state_->observers.resize(expected);
    for (auto &observers : state_->observers)
        for (Observer &observer : observers) observer = Observer(method, percentile);
}

Calibrator::~Calibrator() = default;
Calibrator::Calibrator(Calibrator &&) noexcept = default;
Calibrator &Calibrator::operator=(Calibrator &&) noexcept = default;

void Calibrator::collect(const float *x, int64_t T, int64_t N, const float *h0,
                         const int64_t *lengths) {
    run_layers(state_->shape, state_->cells, {x, T, N, h0, lengths}, nullptr,
               [&](const FloatRun &run) { state_->observe(run, N); });
}

Parameters Calibrator::finalize(const QuantConfig &config) const {
    if (config.input_excludes_zero)
        throw ArgumentError(
            "Expected input_excludes_zero to be false, which calibration in C++ does not support, "
            "got true (operator 'input.x')");
    Parameters found{state_->shape, config, {}};
    Observer both(state_->method, state_->percentile);
    if (config.tie_x_and_h) both = tied_observer(state_->observers, config, std::move(both));
    for (const auto &observers : state_->observers) {
        CellParameters cell;
        cell.config = config;
        for (int i = 0; i < kOperators; ++i) {
            const auto op = static_cast<Operator>(i);
            const auto index = static_cast<size_t>(i);
            const bool tied = config.tie_x_and_h && (op == Operator::x || op == Operator::h);
            const Observer &values = tied ? both : observers[index];
            if (is_calibrated(op) && config[op].bitwidth)
                cell.quantizers[index] = values.quantizer(op, config[op], config.scale_kind);
        }
        set_fixed_ranges(cell);
        build_tables(cell);
        if (config.correct_bias) cell.input_mean = state_->means[found.cells.size()].mean();
        found.cells.push_back(std::move(cell));
    }
    return found;
}

}  // namespace quant_gru
