#include "cpu/training/stack_backward.hpp"

#include <algorithm>
#include <memory>

#include "cpu/core/boundary.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kChunkItems = 512;

size_t floats(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }

class Pass {
 public:
    Pass(const Stack &stack, const std::vector<CellWeights> &weights, const StackBackwardCall &call)
        : stack_(stack),
          weights_(weights),
          call_(call),
          D_(stack.directions()),
          H_(stack.layer(0, 0).H()),
          C_(stack.layer(0, 0).C()),
          cells_(static_cast<int64_t>(stack.depth()) * D_),
          x_(call.x, call.T, call.N, C_),
          h0_(call.h0, cells_, call.N, H_, true),
          grad_y_(call.grad_y, call.T, call.N, D_ * H_),
          grad_last_(call.grad_last, cells_, call.N, H_),
          dh0_(call.dh0, cells_, call.N, H_),
          nan_(static_cast<size_t>(call.T * call.N)),
          rows_(floats(call.N * H_ * 2)),
          state_(static_cast<size_t>(call.N * H_) * 8) {}

    void run() {
        const int64_t T = call_.T, N = call_.N;
        const std::vector<float> zeros(grad_y_.data ? 0 : static_cast<size_t>(D_ * H_));
        const float *grad = grad_y_.data ? grad_y_.data : zeros.data();
        int64_t step = grad_y_.step, row = grad_y_.row;
        std::unique_ptr<Aligned> above;
        for (size_t layer = stack_.depth(); layer-- > 0;) {
            const int64_t width = layer ? D_ * H_ : C_;
            const bool onward = is_wanted_below(layer);
            const bool direct = onward && !layer && call_.dx.is_contiguous(N, C_);
            std::unique_ptr<Aligned> below, other;
            if (onward && !direct) below = std::make_unique<Aligned>(floats(T * N * width));
            if (onward && D_ == 2) other = std::make_unique<Aligned>(floats(T * N * width));
            float *const dx = static_cast<float *>(direct   ? call_.dx.data
                                                   : onward ? below->data
                                                            : nullptr);
            const int64_t bytes = container_bytes(stack_.layer(layer, 0).x().container);
            const int64_t more = container_bytes(stack_.layer(layer, D_ - 1).x().container);
            const int64_t part = T * N * width * std::max(bytes, more);
            const Aligned codes(static_cast<size_t>(part * D_));
            void *const inputs[2] = {codes.data, static_cast<char *>(codes.data) + part};
            read_inputs(layer, inputs);
            for (int d = 0; d < D_; ++d) {
                float *const to = d && onward ? static_cast<float *>(other->data) : dx;
                run_cell(layer, d, inputs[d], grad + d * H_, step, row, to);
                if (onward) mask(layer, d, to);
            }
            if (onward && D_ == 2) {
                const auto *second = static_cast<const float *>(other->data);
                for (int64_t i = 0; i < T * N * width; ++i) dx[i] += second[i];
            }
            if (!onward) break;
            if (!layer) {
                if (!direct) write(dx, T, N, C_, call_.dx);
                break;
            }
            above = std::move(below);
            grad = dx;
            step = N * width;
            row = width;
        }
        dh0_.finish();
    }

 private:
    size_t index(size_t layer, int direction) const {
        return layer * static_cast<size_t>(D_) + static_cast<size_t>(direction);
    }

    // Whether the input of a layer needs a gradient.
    bool is_wanted_below(size_t layer) const {
        bool found = call_.dx.data || (layer && call_.dh0.data);
        for (size_t i = 0; i < index(layer, 0); ++i) found = found || call_.cells[i].is_wanted();
        return found;
    }

    const void *const *outs(size_t layer) const { return call_.out + index(layer, 0); }

    void read_inputs(size_t layer, void *const *codes) {
        if (layer) return stack_.requantize(layer, outs(layer - 1), codes, call_.T * call_.N);
        for (int d = 0; d < D_; ++d)
            quantize_input({x_.data, x_.step, x_.row, call_.T, call_.N, C_}, stack_.layer(0, d).x(),
                           codes[d], static_cast<uint8_t *>(nan_.data));
    }

    void mask(size_t layer, int direction, float *dx) const {
        if (!layer)
            return mask_input({x_.data, x_.step, x_.row, call_.T, call_.N, C_},
                              stack_.layer(0, direction).x(), dx);
        for (int half = 0; half < D_; ++half)
            mask_requantized(stack_.between(layer, direction, half), outs(layer - 1)[half],
                             call_.T * call_.N, H_, dx + half * H_, D_ * H_);
    }

    void run_cell(size_t layer, int direction, const void *x, const float *grad, int64_t step,
                  int64_t row, float *dx) {
        const Layer &one = stack_.layer(layer, direction);
        const size_t cell = index(layer, direction);
        const StackBackwardCall::Gradients &wanted = call_.cells[cell];
        const int64_t N = call_.N, C = one.C(), first = static_cast<int64_t>(cell) * N * H_;
        const Writable dW(wanted.W, 1, 3 * H_, C), dR(wanted.R, 1, 3 * H_, H_);
        const Writable dbw(wanted.bw, 1, 1, 3 * H_), dbr(wanted.br, 1, 1, 3 * H_);
        auto *const last = static_cast<float *>(rows_.data);
        start_last(static_cast<int64_t>(cell), last);
        BackwardCall job;
        static_cast<CellWeights &>(job) = weights_[cell];
        job.x = x;
        job.h0 = state_.data;
        start_state(one.h(), first);
        job.out = call_.out[cell];
        job.lengths = call_.lengths;
        job.T = call_.T;
        job.N = N;
        job.reverse = direction == 1;
        job.grad_out = grad;
        job.grad_step = step;
        job.grad_row = row;
        job.grad_last = last;
        job.dx = dx;
        job.dh0 = dh0_.data ? dh0_.data + first : last + N * H_;
        job.dW = dW.data;
        job.dR = dR.data;
        job.dbw = dbw.data;
        job.dbr = dbr.data;
        job.chunk_items = kChunkItems;
        job.threads = call_.threads;
        quant_gru::run_backward(one, job);
        if (dh0_.data) mask_input({h0_.data + first, 0, H_, 1, N, H_}, one.h(), dh0_.data + first);
        for (const Writable *each : {&dW, &dR, &dbw, &dbr}) each->finish();
    }

    // The gradient of the last states (N, H), NaN for rows that became NaN.
    void start_last(int64_t cell, float *to) const {
        for (int64_t n = 0; n < call_.N; ++n, to += H_) {
            const float nan = call_.nan[cell * call_.N + n];
            if (!grad_last_.data) {
                std::fill(to, to + H_, nan);
                continue;
            }
            const float *from = grad_last_.data + cell * grad_last_.step + n * grad_last_.row;
            for (int64_t i = 0; i < H_; ++i) to[i] = from[i] + nan;
        }
    }

    // The codes of the states before the first step (N, H).
    void start_state(const Quantizer &h, int64_t first) const {
        if (h0_.data)
            quantize_input({h0_.data + first, 0, H_, 1, call_.N, H_}, h, state_.data,
                           static_cast<uint8_t *>(nan_.data));
        else
            fill_codes(state_.data, h.container, call_.N * H_, h.zero);
    }

    const Stack &stack_;
    const std::vector<CellWeights> &weights_;
    const StackBackwardCall &call_;
    const int D_;
    const int64_t H_, C_, cells_;
    const Readable x_, h0_, grad_y_, grad_last_;
    const Writable dh0_;
    const Aligned nan_, rows_, state_;
};

}  // namespace

void run_backward(const Stack &stack, const std::vector<CellWeights> &weights,
                  const StackBackwardCall &call) {
    Pass(stack, weights, call).run();
}

}  // namespace quant_gru
