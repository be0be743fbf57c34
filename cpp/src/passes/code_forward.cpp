#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "cpu/core/tasks.hpp"
#include "frozen_file.hpp"
#include "network.hpp"
#include "passes/sizes.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {
namespace {

Operator full(CodeOperator op) {
    const int i = static_cast<int>(op);
    return static_cast<Operator>(i < 2 ? i : i + 4);  // without the weights
}

bool is_power_of_two(float scale) {
    int exponent = 0;
    return scale == 0 || std::frexp(scale, &exponent) == 0.5f;
}

void check_scale(float scale, const std::string &name) {
    if (!(scale >= 0x1p-126f && scale <= 0x1p127f))
        throw ArgumentError("Expected scale to be a normal positive float32 number, got " +
                            std::to_string(scale) + " (" + name + ")");
}

// The parameters of a GRU whose operators all have so many bits.
Parameters parameters_of(const PassSizes &sizes, int bits, const float *scale,
                         const float *zero_point) {
    Parameters found;
    found.shape.input_size = sizes.C;
    found.shape.hidden_size = sizes.H;
    found.config = QuantConfig::uniform(bits, false);
    const int64_t count = code_scales(sizes.H);
    if (!std::all_of(scale, scale + count, is_power_of_two))
        found.config.scale_kind = ScaleKind::free;
    CellParameters cell;
    for (int i = 0; i < kCodeOperators; ++i) {
        const Operator op = full(static_cast<CodeOperator>(i));
        OperatorConfig &config = found.config[op];
        if (is_fusible(op) && scale[i] == 0) {
            config.bitwidth = 0;
            continue;
        }
        check_scale(scale[i], "operator '" + std::string(name_of(op)) + "'");
        ActivationQuantizer q{bits, !config.is_unsigned, static_cast<double>(scale[i]), 0};
        const auto lo = static_cast<float>(q.lo()), hi = static_cast<float>(q.hi());
        if (!(zero_point[i] >= lo && zero_point[i] <= hi &&
              zero_point[i] == std::rint(zero_point[i])))
            throw ArgumentError("Expected zero_point to be an integer in [" +
                                std::to_string(q.lo()) + ", " + std::to_string(q.hi()) + "], got " +
                                std::to_string(zero_point[i]) + " (operator '" + name_of(op) +
                                "')");
        q.zero_point = static_cast<int64_t>(zero_point[i]);
        cell.quantizers[static_cast<size_t>(op)] = q;
    }
    for (int64_t i = kCodeOperators; i < count; ++i) check_scale(scale[i], "weights");
    cell.config = found.config;
    build_tables(cell);
    found.cells.push_back(std::move(cell));
    return found;
}

// Codes (K, 3H) with a bias, as rows.
template <class T>
WeightCodes codes_of(const T *w, const int32_t *b, int64_t K, int64_t H, const float *scales,
                     const float *bias_scales) {
    const int64_t rows = 3 * H;
    WeightCodes to;
    for (int64_t c = 0; c < rows; ++c)
        for (int64_t i = 0; i < K; ++i) to.codes.push_back(w[i * rows + c]);
    to.bias_codes.assign(b, b + rows);
    to.scales.assign(scales, scales + rows);
    to.bias_scales.assign(bias_scales, bias_scales + rows);
    return to;
}

}  // namespace

template <class T>
struct CodeForwardPass<T>::State {
    // Builds the layer, unless the bytes of all arguments equal those of the last call.
    void prepare(const T *W, const T *R, const int32_t *bx, const int32_t *br, float probability,
                 const float *scale, const float *zero_point) {
        const int64_t C = sizes.C, H = sizes.H;
        std::string key;
        const auto add = [&key](const void *from, int64_t bytes) {
            key.append(static_cast<const char *>(from), static_cast<size_t>(bytes));
        };
        add(W, C * 3 * H * static_cast<int64_t>(sizeof(T)));
        add(R, H * 3 * H * static_cast<int64_t>(sizeof(T)));
        for (const int32_t *bias : {bx, br}) add(bias, 3 * H * 4);
        add(scale, code_scales(H) * 4);
        add(zero_point, kCodeOperators * 4);
        add(&probability, 4);
        if (layer && key == last) return;
        Parameters parameters = parameters_of(sizes, 8 * sizeof(T), scale, zero_point);
        parameters.shape.zoneout = static_cast<double>(probability);
        const CellParameters &cell = parameters.cells[0];
        const float *s = scale + kCodeOperators;
        const std::string file = frozen_file(
            parameters,
            {weight_numbers(cell, Operator::W, codes_of(W, bx, C, H, s, s + 6 * H)),
             weight_numbers(cell, Operator::R, codes_of(R, br, H, H, s + 3 * H, s + 9 * H))},
            false);
        layer.reset();
        layer.emplace(layer_plan(read_frozen(file.data(), file.size()).cells[0].numbers),
                      chosen_instruction_set());
        last = std::move(key);
    }

    void run(int64_t steps, const T *x, const T *before, T *after, const T *mask) {
        const int64_t N = sizes.N, C = sizes.C, H = sizes.H;
        Job job;
        job.x = {x, false, N * C, C};
        job.h0 = {before, false, 0, H};
        job.out.codes = after;
        job.out.codes_step = N * H;
        job.out.codes_row = H;
        final.resize(static_cast<size_t>(N * H));
        job.last.codes = final.data();
        job.last.codes_row = H;
        if (mask) {
            held.resize(static_cast<size_t>(steps * N * H));
            for (size_t i = 0; i < held.size(); ++i) held[i] = mask[i] == 0;
            job.held = held.data();
        }
        job.T = steps;
        job.N = N;
        run_tasks({{&*layer, job}}, 1, scratch);
    }

    PassSizes sizes;
    std::string last;  // all bytes that the layer follows from
    std::optional<Layer> layer;
    std::vector<uint8_t> held;
    std::vector<T> final;
    Scratch scratch;
};

template <class T>
CodeForwardPass<T>::CodeForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                                    const cublasHandle_t &, const cudaStream_t &)
    : state_(new State{PassSizes(batch_size, input_size, hidden_size), {}, {}, {}, {}, {}}) {
    if (training)
        throw ArgumentError(
            "Expected training to be false, because codes have no backward pass, "
            "got true");
}

template <class T>
CodeForwardPass<T>::~CodeForwardPass() = default;

template <class T>
void CodeForwardPass<T>::Run(int steps, const T *W, const T *R, const int32_t *bx,
                             const int32_t *br, const T *x, T *h, T *, int32_t *, int32_t *,
                             float zoneout_prob, const T *zoneout_mask, const float *scale,
                             const float *zero_point) {
    check_steps(steps);
    check_zoneout(zoneout_prob);
    state_->prepare(W, R, bx, br, zoneout_prob, scale, zero_point);
    if (steps) state_->run(steps, x, h, h + state_->sizes.N * state_->sizes.H, zoneout_mask);
}

template <class T>
void CodeForwardPass<T>::Iterate(const T *W, const T *R, const int32_t *bx, const int32_t *br,
                                 const T *x, const T *h, T *h_out, T *, int32_t *, int32_t *,
                                 float zoneout_prob, const T *zoneout_mask, const float *scale,
                                 const float *zero_point) {
    check_zoneout(zoneout_prob);
    state_->prepare(W, R, bx, br, zoneout_prob, scale, zero_point);
    state_->run(1, x, h, h_out, zoneout_mask);
}

template class CodeForwardPass<int8_t>;
template class CodeForwardPass<int16_t>;

}  // namespace quant_gru
