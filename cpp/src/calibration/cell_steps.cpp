#include "calibration/cell_steps.hpp"

#include <algorithm>

#include "calibration/projection.hpp"

namespace quant_gru {
namespace {

// Copies a row of values, rounded to float.
void round_row(const double *from, int64_t width, int64_t row, std::vector<float> &to) {
    std::copy_n(from, width, to.begin() + row * width);
}

// Copies a row update, reset, candidate to a row reset, update, candidate.
void round_gates(const double *from, int64_t H, int64_t row, std::vector<float> &to) {
    const auto first = to.begin() + row * 3 * H;
    std::copy_n(from + H, H, first);
    std::copy_n(from, H, first + H);
    std::copy_n(from + 2 * H, H, first + 2 * H);
}

// `steps` has the sizes.
void fill(CellSteps &steps, const FloatRun &run, const FloatCell &cell) {
    const int64_t C = run.C, H = steps.H;
    const HasteCell w(cell, C, H);
    std::vector<double> Wx, Rh;
    FloatProjection(w.W, w.bx, C, H).multiply(run.x, run.rows, Wx);
    FloatProjection(w.R, w.br, H, H).multiply(run.before, run.rows, Rh);
    steps.C = C;
    steps.x.resize(static_cast<size_t>(run.rows * C));
    for (auto *each : {&steps.Wx, &steps.Rh}) each->resize(Wx.size());
    for (auto *each : {&steps.before, &steps.after})
        each->resize(static_cast<size_t>(run.rows * H));
    int64_t from = 0;  // rows of a run are in the order of processing
    for (size_t i = 0; i < steps.batch_sizes.size(); ++i)
        for (int64_t n = 0; n < steps.batch_sizes[i]; ++n, ++from) {
            const int64_t to = steps.row(static_cast<int64_t>(i), n);
            round_row(run.x + from * C, C, to, steps.x);
            round_row(run.before + from * H, H, to, steps.before);
            round_row(run.after + from * H, H, to, steps.after);
            round_gates(Wx.data() + from * 3 * H, H, to, steps.Wx);
            round_gates(Rh.data() + from * 3 * H, H, to, steps.Rh);
        }
}

}  // namespace

std::vector<CellSteps> steps_in(const Windows &windows, const GRUShape &shape,
                                const std::vector<FloatCell> &cells) {
    std::vector<const Window *> sorted;
    for (const auto &each : windows.kept()) sorted.push_back(&each.second);
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const Window *a, const Window *b) { return a->steps > b->steps; });
    const auto N = static_cast<int64_t>(sorted.size());
    const int64_t C = shape.input_size, H = shape.hidden_size;
    const int64_t T = N ? sorted[0]->steps : 0;
    CellSteps form;
    form.H = H;
    form.batch_sizes.resize(static_cast<size_t>(T));
    std::vector<float> x(static_cast<size_t>(T * N * C));
    std::vector<float> h0(cells.size() * static_cast<size_t>(N * H));
    for (int64_t n = 0; n < N; ++n) {
        const Window &window = *sorted[static_cast<size_t>(n)];
        form.lengths.push_back(window.steps);
        for (int64_t t = 0; t < window.steps; ++t) {
            ++form.batch_sizes[static_cast<size_t>(t)];
            std::copy_n(window.x.begin() + t * C, C, x.begin() + (t * N + n) * C);
        }
        for (int64_t cell = 0; cell < static_cast<int64_t>(cells.size()); ++cell)
            std::copy_n(window.h0.begin() + cell * H, H, h0.begin() + (cell * N + n) * H);
    }
    int64_t rows = 0;
    for (int64_t size : form.batch_sizes) {
        form.offsets.push_back(rows);
        rows += size;
    }
    std::vector<CellSteps> found(cells.size(), form);
    run_layers(shape, cells, {x.data(), T, N, h0.data(), form.lengths.data()}, nullptr,
               [&](const FloatRun &run) {
                   found[run.cell].reverse = shape.bidirectional && run.cell % 2;
                   fill(found[run.cell], run, cells[run.cell]);
               });
    return found;
}

}  // namespace quant_gru
