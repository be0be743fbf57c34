#include "cpu/core/stack.hpp"

#include <algorithm>
#include <utility>

#include "cpu/core/nan_rows.hpp"
#include "cpu/core/tasks.hpp"

namespace quant_gru {

void fill_codes(void *codes, Container container, int64_t count, int64_t code) {
    switch (container) {
        case Container::i8:
        case Container::u8:
            std::fill_n(static_cast<uint8_t *>(codes), count, static_cast<uint8_t>(code));
            break;
        case Container::i16:
            std::fill_n(static_cast<int16_t *>(codes), count, static_cast<int16_t>(code));
            break;
        case Container::i32:
            std::fill_n(static_cast<int32_t *>(codes), count, static_cast<int32_t>(code));
            break;
        default:
            std::fill_n(static_cast<int64_t *>(codes), count, code);
    }
}

Stack::Stack(std::vector<std::vector<const Layer *>> layers,
             std::vector<std::vector<std::vector<Requantizer>>> between,
             std::vector<const uint8_t *> finite)
    : layers_(std::move(layers)), between_(std::move(between)), finite_(std::move(finite)) {
    for (const auto &directions : layers_)
        for (const Layer *each : directions)
            code_bytes_ = std::max<int64_t>({code_bytes_, container_bytes(each->x().container),
                                             container_bytes(each->h().container)});
}

void Stack::requantize(size_t layer, const void *const *below, void *const *codes,
                       int64_t rows) const {
    const int D = directions();
    const int64_t H = this->layer(layer, 0).H();
    for (int direction = 0; direction < D; ++direction)
        for (int half = 0; half < D; ++half) {
            const Requantizer &r = between(layer, direction, half);
            char *to = static_cast<char *>(codes[direction]) + half * H * container_bytes(r.to);
            // With one direction below, all states are contiguous.
            const int64_t count = D == 1 ? 1 : rows, n = D == 1 ? rows * H : H;
            quant_gru::requantize(r, below[half], count, n, to, D * H);
        }
}

bool Stack::has_finite_weights() const {
    for (const uint8_t *each : finite_)
        if (!*each) return false;
    return true;
}

void Stack::mark_nan(const Call &call) const {
    const int D = directions();
    const int64_t H = layer(0, 0).H(), T = call.T, N = call.N;
    NaNRows input = rows_with_nan(call.x, T, call.x_step, N, call.x_row, layer(0, 0).C());
    for (size_t i = 0; i < depth(); ++i) {
        NaNRows output(input.size());
        for (int direction = 0; direction < D; ++direction) {
            const size_t index = i * static_cast<size_t>(D) + static_cast<size_t>(direction);
            const int64_t first = static_cast<int64_t>(index) * N * H;
            NaNRows state(static_cast<size_t>(N), 1);
            if (*finite_[index])
                state = call.h0 ? rows_with_nan(call.h0 + first, 1, 0, N, H, H)
                                : NaNRows(static_cast<size_t>(N));
            const NaNRows half = spread_nan(input, state, direction == 1);
            fill_nan(state, call.last + first, 1, 0, N, H, H);
            if (i + 1 == depth())
                fill_nan(half, call.y + direction * H, T, call.y_step, N, call.y_row, H);
            for (size_t row = 0; row < half.size(); ++row) output[row] |= half[row];
        }
        input = std::move(output);
    }
}

void Stack::run(const Call &call) {
    const int D = directions();
    const int64_t H = layer(0, 0).H(), N = call.N, T = call.T;
    const int64_t part = T * N * H * code_bytes_;  // the codes of one direction
    const bool several = depth() > 1;
    Scratch::Lease lease(codes_, several ? static_cast<size_t>(part * D * (1 + D)) : 0);
    char *states = static_cast<char *>(lease.data);
    void *inputs[2] = {states + part * D, states + part * D * 2};
    void *below[2] = {states, states + part};
    bool nan = !has_finite_weights();
    for (size_t i = 0; i < depth(); ++i) {
        if (i) requantize(i, below, inputs, T * N);
        std::vector<Task> tasks;
        for (int direction = 0; direction < D; ++direction) {
            const Layer &one = layer(i, direction);
            const int64_t index = static_cast<int64_t>(i) * D + direction;
            Job job;
            if (i == 0)
                job.x = {call.x, true, call.x_step, call.x_row};
            else
                job.x = {inputs[direction], false, N * H * D, H * D};
            job.h0 = {call.h0 ? call.h0 + index * N * H : nullptr, true, 0, H};
            const bool top = i + 1 == depth();
            if (top) {
                job.out.real = call.y + direction * H;
                job.out.real_step = call.y_step;
                job.out.real_row = call.y_row;
            }
            if (call.kept) below[direction] = call.kept[index];
            if (call.kept || !top) {
                job.out.codes = below[direction];
                job.out.codes_step = N * H;
                job.out.codes_row = H;
            }
            job.last.real = call.last + index * N * H;
            job.last.real_row = H;
            job.lengths = call.lengths;
            job.T = T;
            job.N = N;
            job.reverse = direction == 1;
            tasks.push_back({&one, job});
        }
        nan |= run_tasks(tasks, call.threads, scratch_);
    }
    if (nan) mark_nan(call);
}

void Stack::run(const RealCall &call) {
    const int64_t T = call.T, N = call.N, H = layer(0, 0).H(), width = directions() * H;
    const int64_t cells = static_cast<int64_t>(depth()) * directions();
    const Readable x(call.x, T, N, layer(0, 0).C()), h0(call.h0, cells, N, H, true);
    const Writable last(call.last, cells, N, H);
    // Kernels write steps and rows of any strides.
    const bool direct = call.y.is_plain();
    const Writable y(direct ? RealValues{} : call.y, T, N, width);
    Call job;
    job.x = x.data;
    job.x_step = x.step;
    job.x_row = x.row;
    job.h0 = h0.data;
    job.y = direct ? static_cast<float *>(call.y.data) : y.data;
    job.y_step = direct ? call.y.step : N * width;
    job.y_row = direct ? call.y.row : width;
    job.last = last.data;
    job.kept = call.kept;
    job.lengths = call.lengths;
    job.T = T;
    job.N = N;
    job.threads = call.threads;
    run(job);
    // A row of last states is NaN either completely or not at all.
    if (call.nan)
        for (int64_t i = 0; i < cells * N; ++i) call.nan[i] = last.data[i * H] * 0.f;
    y.finish();
    last.finish();
}

int64_t Stack::step_workspace(int64_t N) const {
    int64_t bytes = 0;
    for (size_t i = 0; i < depth(); ++i) bytes = std::max(bytes, layer(i, 0).workspace(N, 1));
    return cache_lines(bytes) + N * layer(0, 0).H() * code_bytes_;
}

void Stack::clear(int64_t N, void *const *state) const {
    for (size_t i = 0; i < depth(); ++i) {
        const Layer &one = layer(i, 0);
        const bool wide = one.kind() == Layer::Kind::wide;
        const int64_t zero = wide ? one.wide().R.zero : one.h().zero;
        fill_codes(state[i], one.h().container, N * one.H(), zero);
    }
}

bool Stack::step(const float *x, int64_t N, void *const *state, float *y, void *workspace) const {
    const int64_t H = layer(0, 0).H(), C = layer(0, 0).C();
    void *codes = nullptr;  // between layers
    if (depth() > 1)
        codes = static_cast<char *>(workspace) + step_workspace(N) - N * H * code_bytes_;
    bool nan = false;
    for (size_t i = 0; i < depth(); ++i) {
        const Layer &one = layer(i, 0);
        Job job;
        if (i == 0) {
            job.x = {x, true, 0, C};
        } else {
            requantize(i, &state[i - 1], &codes, N);
            job.x = {codes, false, 0, H};
        }
        job.h0 = {state[i], false, 0, H};
        job.last.codes = state[i];
        job.last.codes_row = H;
        if (i + 1 == depth()) {
            job.last.real = y;
            job.last.real_row = H;
        }
        job.T = 1;
        job.N = N;
        job.end_row = N;
        job.workspace = workspace;
        nan |= one.run(job);
    }
    return nan;
}

}  // namespace quant_gru
