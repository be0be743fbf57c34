#include "calibration/float_gru.hpp"

#include <algorithm>

#include "quant_gru/calibration.hpp"
#include "quant_gru/gru_interface.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

using Reals = std::vector<double>;

size_t size(int64_t count) { return static_cast<size_t>(count); }

void check(const GRUShape &shape, const std::vector<FloatCell> &cells, const FloatInput &input) {
    const int64_t expected = shape.num_layers * shape.directions();
    if (static_cast<int64_t>(cells.size()) != expected)
        throw ArgumentError("Expected weights of " + std::to_string(expected) + " cells, got " +
                            std::to_string(cells.size()));
    if (input.T < 0 || input.N < 0)
        throw ArgumentError("Expected T and N to be at least 0, got " + std::to_string(input.T) +
                            " and " + std::to_string(input.N));
    for (int64_t n = 0; input.lengths && n < input.N; ++n)
        if (input.lengths[n] < 1 || input.lengths[n] > input.T)
            throw ArgumentError("Expected lengths to be in [1, " + std::to_string(input.T) +
                                "], got " + std::to_string(input.lengths[n]));
}

// One layer and direction of a run.
class Direction {
 public:
    Direction(const FloatInput &input, bool reverse, int64_t C, int64_t H)
        : input_(input), reverse_(reverse), C_(C), H_(H) {}

    // Runs the layer on x (T, N, C).
    void run(const FloatCell &cell, const double *x, const double *h0) {
        const int64_t T = input_.T, N = input_.N;
        const HasteCell w(cell, C_, H_);
        const Reals ordered = in_processing_order(x);
        h_.assign(size((T + 1) * N * H_), 0.0);
        std::copy_n(h0, N * H_, h_.begin());
        Reals Wx(size(T * N * 3 * H_)), Rh(size(N * 3 * H_));
        ForwardPass<double> pass(false, static_cast<int>(N), static_cast<int>(C_),
                                 static_cast<int>(H_));
        pass.Run(static_cast<int>(T), w.W.data(), w.R.data(), w.bx.data(), w.br.data(),
                 ordered.data(), h_.data(), nullptr, Wx.data(), Rh.data(), 0, nullptr);
    }

    const double *states() const { return h_.data(); }

    int64_t length(int64_t n) const { return input_.lengths ? input_.lengths[n] : input_.T; }

    // The valid steps in processing order: a step's input, the states before and after it.
    void rows(const double *x, Reals &inputs, Reals &before, Reals &after) const {
        const int64_t N = input_.N;
        for (int64_t t = 0; t < input_.T; ++t)
            for (int64_t n = 0; n < N; ++n) {
                if (t >= length(n)) continue;
                const double *from = x + (step(t, n) * N + n) * C_;
                const double *h = h_.data() + (t * N + n) * H_;
                inputs.insert(inputs.end(), from, from + C_);
                before.insert(before.end(), h, h + H_);
                after.insert(after.end(), h + N * H_, h + N * H_ + H_);
            }
    }

    // Writes the states (T, N, H) to columns of y, and the last ones (N, H).
    void write(double *y, int64_t width, float *last) const {
        const int64_t N = input_.N;
        for (int64_t n = 0; n < N; ++n) {
            for (int64_t t = 0; t < length(n); ++t)
                std::copy_n(h_.data() + ((t + 1) * N + n) * H_, H_,
                            y + (step(t, n) * N + n) * width);
            if (last) std::copy_n(h_.data() + (length(n) * N + n) * H_, H_, last + n * H_);
        }
    }

 private:
    // The step of a sequence that is processed as number t; its own inverse.
    int64_t step(int64_t t, int64_t n) const {
        return reverse_ && t < length(n) ? length(n) - 1 - t : t;
    }

    Reals in_processing_order(const double *x) const {
        const int64_t T = input_.T, N = input_.N;
        Reals ordered(size(T * N * C_));
        for (int64_t t = 0; t < T; ++t)
            for (int64_t n = 0; n < N; ++n)
                std::copy_n(x + (step(t, n) * N + n) * C_, C_, ordered.begin() + (t * N + n) * C_);
        return ordered;
    }

    const FloatInput &input_;
    bool reverse_;
    int64_t C_, H_;
    Reals h_;  // (T + 1, N, H), in processing order
};

}  // namespace

HasteCell::HasteCell(const FloatCell &cell, int64_t C, int64_t H)
    : W(size(C * 3 * H)), R(size(H * 3 * H)), bx(size(3 * H), 0.0), br(size(3 * H), 0.0) {
    for (int64_t c = 0; c < 3 * H; ++c) {
        // columns update, reset, candidate from rows reset, update, candidate
        const int64_t row = c < H ? c + H : c < 2 * H ? c - H : c;
        for (int64_t i = 0; i < C; ++i) W[size(i * 3 * H + c)] = cell.W[row * C + i];
        for (int64_t i = 0; i < H; ++i) R[size(i * 3 * H + c)] = cell.R[row * H + i];
        if (cell.bw) bx[size(c)] = cell.bw[row];
        if (cell.br) br[size(c)] = cell.br[row];
    }
}

std::vector<double> run_layers(const GRUShape &shape, const std::vector<FloatCell> &cells,
                               const FloatInput &input, float *h_n,
                               const std::function<void(const FloatRun &)> &show) {
    check(shape, cells, input);
    const int64_t H = shape.hidden_size, D = shape.directions(), N = input.N, T = input.T;
    Reals x(input.x, input.x + T * N * shape.input_size);
    for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
        const int64_t C = layer ? D * H : shape.input_size;
        Reals y(size(T * N * D * H), 0.0);
        for (int64_t d = 0; d < D; ++d) {
            const auto index = size(layer * D + d);
            Reals h0(size(N * H), 0.0);
            if (input.h0)
                std::copy_n(input.h0 + static_cast<int64_t>(index) * N * H, N * H, h0.begin());
            Direction direction(input, d == 1, C, H);
            if (N > 0) direction.run(cells[index], x.data(), h0.data());
            Reals inputs, before, after;
            if (show && N > 0) {
                direction.rows(x.data(), inputs, before, after);
                show({index, static_cast<int64_t>(after.size()) / H, C, inputs.data(),
                      before.data(), after.data(), direction.states()});
            }
            if (N > 0)
                direction.write(y.data() + d * H, D * H,
                                h_n ? h_n + static_cast<int64_t>(index) * N * H : nullptr);
        }
        x = std::move(y);
    }
    return x;
}

void run_float(const GRUShape &shape, const std::vector<FloatCell> &cells, const float *x,
               int64_t T, int64_t N, float *y, float *h_n, const float *h0,
               const int64_t *lengths) {
    const Reals found = run_layers(shape, cells, {x, T, N, h0, lengths}, h_n, nullptr);
    std::copy(found.begin(), found.end(), y);
}

}  // namespace quant_gru
