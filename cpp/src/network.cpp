#include "network.hpp"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

namespace quant_gru {
namespace {

const uint8_t kFinite = 1;  // integers are

void require(bool holds, const std::string &rule, int64_t got) {
    if (!holds) throw ArgumentError("Expected " + rule + ", got " + std::to_string(got));
}

// Whether all buffers of a call have sizes that 64 bits hold.
bool fits(const Shape &s, int64_t T, int64_t N) {
    const int64_t width = std::max(s.input_size, 8 * s.hidden_size * s.directions);
    int64_t size = 8 * width;
    return !__builtin_mul_overflow(size, T, &size) && !__builtin_mul_overflow(size, N, &size) &&
           !__builtin_mul_overflow(size, s.num_layers, &size);
}

// Calls f with each row and step beyond the lengths.
template <class F>
void each_padding(const Stack::Call &call, F f) {
    if (!call.lengths) return;
    for (int64_t row = 0; row < call.N; ++row)
        for (int64_t step = call.lengths[row]; step < call.T; ++step) f(row, step);
}

// A stack takes NaN in any step as an input. If there is NaN beyond the lengths, this function
// copies x to `space`, with zeros there, and lets the call read the copy.
void drop_padded_nan(Stack::Call &call, int64_t C, std::vector<float> &space) {
    bool nan = false;
    each_padding(call, [&](int64_t row, int64_t step) {
        const float *x = call.x + step * call.x_step + row * call.x_row;
        nan = nan || std::any_of(x, x + C, [](float v) { return v != v; });
    });
    if (!nan) return;
    space.assign(call.x, call.x + call.T * call.N * C);
    call.x = space.data();
    each_padding(call, [&](int64_t row, int64_t step) {
        std::fill_n(space.data() + step * call.x_step + row * call.x_row, C, 0.f);
    });
}

}  // namespace

int thread_count(int wanted) {
    if (wanted > 0) return wanted;
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::string chosen_instruction_set() {
    const std::vector<std::string> names = variants(true);
    const char *variable = std::getenv("QUANT_GRU_CPU");
    const std::string wanted = variable ? variable : "";
    if (wanted.empty() && !names.empty()) return names[0];
    if (std::find(names.begin(), names.end(), wanted) != names.end()) return wanted;
    std::string known;
    for (const std::string &each : names) known += (known.empty() ? "" : ", ") + each;
    if (wanted.empty())
        throw ArgumentError(
            "Expected a processor with the instruction sets of this library, got another one");
    throw ArgumentError("Expected QUANT_GRU_CPU to be one of " + known + ", got '" + wanted + "'");
}

Network::Network(const FrozenGRU &gru, const std::string &instruction_set) : shape_(gru.shape) {
    const auto D = static_cast<size_t>(shape_.directions);
    for (const FrozenCell &cell : gru.cells)
        layers_.push_back(std::make_unique<Layer>(layer_plan(cell.numbers), instruction_set));
    std::vector<std::vector<const Layer *>> layers;
    std::vector<std::vector<std::vector<Requantizer>>> between;
    for (size_t first = 0; first < layers_.size(); first += D) {
        auto &directions = layers.emplace_back();
        for (size_t d = 0; d < D; ++d) directions.push_back(layers_[first + d].get());
        if (!first) continue;
        auto &above = between.emplace_back();
        for (size_t d = 0; d < D; ++d) {
            auto &halves = above.emplace_back();
            const FrozenCell &cell = gru.cells[first + d];
            for (size_t below = 0; below < D; ++below)
                halves.push_back(requantizer(cell.between[below],
                                             gru.cells[first - D + below].numbers.h, cell.numbers.x,
                                             cell.numbers.rounding));
        }
    }
    stack_ = std::make_unique<Stack>(std::move(layers), std::move(between),
                                     std::vector<const uint8_t *>(layers_.size(), &kFinite));
}

void Network::run(const float *x, int64_t T, int64_t N, float *y, const RunOptions &options) const {
    require(T >= 1, "T to be at least 1", T);
    require(N >= 1, "N to be at least 1", N);
    require(fits(shape_, T, N), "T * N to be smaller", T);
    require(options.threads >= 0, "threads to be at least 0", options.threads);
    if (!x || !y) throw ArgumentError("Expected addresses of x and y, got null");
    if (options.lengths)
        for (int64_t row = 0; row < N; ++row)
            require(options.lengths[row] >= 0 && options.lengths[row] <= T,
                    "lengths to be in [0, " + std::to_string(T) + "]", options.lengths[row]);
    const int64_t C = shape_.input_size, H = shape_.hidden_size, width = shape_.directions * H;
    std::vector<float> last;
    if (!options.h_n) last.resize(layers_.size() * static_cast<size_t>(N * H));
    Stack::Call call;
    call.x = x;
    call.x_step = shape_.batch_first ? C : N * C;
    call.x_row = shape_.batch_first ? T * C : C;
    call.h0 = options.h0;
    call.y = y;
    call.y_step = shape_.batch_first ? width : N * width;
    call.y_row = shape_.batch_first ? T * width : width;
    call.last = options.h_n ? options.h_n : last.data();
    call.lengths = options.lengths;
    call.T = T;
    call.N = N;
    call.threads = thread_count(options.threads);
    std::vector<float> space;
    drop_padded_nan(call, C, space);
    stack_->run(call);
    each_padding(call, [&](int64_t row, int64_t step) {
        std::fill_n(y + step * call.y_step + row * call.y_row, width, 0.f);
    });
}

}  // namespace quant_gru
