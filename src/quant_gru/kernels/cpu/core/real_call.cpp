#include "cpu/core/real_call.hpp"

namespace quant_gru {

void run_real(Stack &stack, const RealCall &call) {
    const Layer &bottom = stack.layer(0, 0);
    const int64_t T = call.T, N = call.N, H = bottom.H(), width = stack.directions() * H;
    const int64_t cells = static_cast<int64_t>(stack.depth()) * stack.directions();
    const Readable x(call.x, T, N, bottom.C()), h0(call.h0, cells, N, H, true);
    const Writable last(call.last, cells, N, H);
    // Kernels write steps and rows of any strides.
    const bool direct = call.y.is_plain();
    const Writable y(direct ? RealValues{} : call.y, T, N, width);
    Stack::Call job;
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
    stack.run(job);
    // A row of last states is NaN either completely or not at all.
    if (call.nan)
        for (int64_t i = 0; i < cells * N; ++i) call.nan[i] = last.data[i * H] * 0.f;
    y.finish();
    last.finish();
}

}  // namespace quant_gru
