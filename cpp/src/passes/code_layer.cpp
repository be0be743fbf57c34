#include "passes/code_layer.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "frozen_file.hpp"
#include "network.hpp"
#include "plan/cell_plan.hpp"

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

// Codes (K, 3H), or (3H, K) if they are transposed, with a bias.
template <class T>
WeightCodes codes_of(const CodeArguments<T> &arguments, Operator op, int64_t K, int64_t H) {
    const bool input = op == Operator::W;
    const T *w = input ? arguments.W : arguments.R;
    const int32_t *b = input ? arguments.bx : arguments.br;
    const float *scales = arguments.column_scales(input ? 0 : 1, H);
    const float *bias_scales = arguments.column_scales(input ? 2 : 3, H);
    const int64_t rows = 3 * H;
    WeightCodes to;
    to.codes.reserve(static_cast<size_t>(rows * K));
    for (int64_t c = 0; c < rows; ++c)
        for (int64_t i = 0; i < K; ++i)
            to.codes.push_back(w[arguments.transposed ? c * K + i : i * rows + c]);
    to.bias_codes.assign(b, b + rows);
    to.scales.assign(scales, scales + rows);
    to.bias_scales.assign(bias_scales, bias_scales + rows);
    return to;
}

}  // namespace

template <class T>
std::string bytes_of(const PassSizes &sizes, const CodeArguments<T> &arguments) {
    const int64_t C = sizes.C, H = sizes.H;
    std::string bytes;
    const auto add = [&bytes](const void *from, int64_t count) {
        bytes.append(static_cast<const char *>(from), static_cast<size_t>(count));
    };
    add(arguments.W, C * 3 * H * static_cast<int64_t>(sizeof(T)));
    add(arguments.R, H * 3 * H * static_cast<int64_t>(sizeof(T)));
    for (const int32_t *bias : {arguments.bx, arguments.br}) add(bias, 3 * H * 4);
    add(arguments.scale, code_scales(H) * 4);
    add(arguments.zero_point, kCodeOperators * 4);
    add(&arguments.zoneout, 4);
    return bytes;
}

template <class T>
std::string frozen_codes(const PassSizes &sizes, const CodeArguments<T> &arguments) {
    Parameters parameters =
        parameters_of(sizes, 8 * sizeof(T), arguments.scale, arguments.zero_point);
    parameters.shape.zoneout = static_cast<double>(arguments.zoneout);
    const CellParameters &cell = parameters.cells[0];
    return frozen_file(
        parameters,
        {weight_numbers(cell, Operator::W, codes_of(arguments, Operator::W, sizes.C, sizes.H)),
         weight_numbers(cell, Operator::R, codes_of(arguments, Operator::R, sizes.H, sizes.H))},
        false);
}

template <class T>
const Layer &CodeLayer<T>::of(const PassSizes &sizes, const CodeArguments<T> &arguments) {
    std::string bytes = bytes_of(sizes, arguments);
    if (layer_ && bytes == last_) return *layer_;
    const std::string file = frozen_codes(sizes, arguments);
    layer_.reset();
    layer_.emplace(layer_plan(read_frozen(file.data(), file.size()).cells[0].numbers),
                   chosen_instruction_set());
    last_ = std::move(bytes);
    return *layer_;
}

template std::string bytes_of(const PassSizes &, const CodeArguments<int8_t> &);
template std::string bytes_of(const PassSizes &, const CodeArguments<int16_t> &);
template std::string frozen_codes(const PassSizes &, const CodeArguments<int8_t> &);
template std::string frozen_codes(const PassSizes &, const CodeArguments<int16_t> &);
template class CodeLayer<int8_t>;
template class CodeLayer<int16_t>;

}  // namespace quant_gru
