// The file of a frozen GRU, with the bytes that Python writes.
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "json_writer.hpp"
#include "number_rules.hpp"
#include "parameters/document.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

struct TensorBytes {
    const char *dtype;
    int size;  // bytes per element
    std::vector<int64_t> shape;
    std::string bytes;
};

using TensorMap = std::map<std::string, TensorBytes>;

template <class To>
TensorBytes tensor_of(const char *dtype, const std::vector<int64_t> &values,
                      std::vector<int64_t> shape) {
    TensorBytes to{dtype, sizeof(To), std::move(shape), {}};
    to.bytes.reserve(values.size() * sizeof(To));
    for (int64_t value : values) {
        // little-endian on every machine
        auto bits = static_cast<uint64_t>(value);
        for (size_t i = 0; i < sizeof(To); ++i, bits >>= 8) to.bytes += static_cast<char>(bits);
    }
    return to;
}

TensorBytes integers(const std::vector<int64_t> &values, std::vector<int64_t> shape) {
    return tensor_of<int64_t>("I64", values, std::move(shape));
}

TensorBytes integers(const std::vector<int64_t> &values) {
    return integers(values, {static_cast<int64_t>(values.size())});
}

// Integers in the smallest of int8, uint8, int16, int32, int64 that holds lo and hi.
TensorBytes compact(const std::vector<int64_t> &values, std::vector<int64_t> shape, int64_t lo,
                    int64_t hi) {
    const auto in = [lo, hi](auto type) {
        using T = decltype(type);
        return lo >= std::numeric_limits<T>::min() && hi <= std::numeric_limits<T>::max();
    };
    if (in(int8_t{})) return tensor_of<int8_t>("I8", values, std::move(shape));
    if (in(uint8_t{})) return tensor_of<uint8_t>("U8", values, std::move(shape));
    if (in(int16_t{})) return tensor_of<int16_t>("I16", values, std::move(shape));
    if (in(int32_t{})) return tensor_of<int32_t>("I32", values, std::move(shape));
    return integers(values, std::move(shape));
}

TensorBytes compact(const std::vector<int64_t> &values, std::vector<int64_t> shape) {
    int64_t lo = values[0], hi = values[0];
    for (int64_t value : values) {
        lo = value < lo ? value : lo;
        hi = value > hi ? value : hi;
    }
    return compact(values, std::move(shape), lo, hi);
}

TensorBytes float32(double value) {
    const auto real = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &real, sizeof bits);
    TensorBytes to = tensor_of<int32_t>("F32", {static_cast<int64_t>(bits)}, {1});
    return to;
}

std::vector<int64_t> numbers_of(const Multipliers &sum) {
    std::vector<int64_t> found = {sum.k};
    found.insert(found.end(), sum.M.begin(), sum.M.end());
    return found;
}

void add_matrix(const WeightNumbers &m, const char *const (&names)[4], int bits, int64_t K,
                const std::string &suffix, TensorMap &to) {
    const auto rows = static_cast<int64_t>(m.M.size());
    const int64_t hi = (int64_t{1} << (bits - 1)) - 1;
    to[names[0] + suffix] = compact(m.codes, {rows, K}, -hi - 1, hi);
    to[names[1] + suffix] = compact(m.bias, {rows});
    to[names[2] + suffix] = compact(m.M, {rows});
    to[names[3] + suffix] = compact(m.k, {rows});
}

// Throws ArgumentError unless kernels can accumulate K products.
void check_inputs(const CellParameters &cell, Operator weight, int64_t K) {
    const bool input = weight == Operator::W;
    const int bits = cell.config[weight].bitwidth;
    const int64_t most =
        most_inputs(bits, cell.quantizer(input ? Operator::x : Operator::h).max_abs());
    if (K > most)
        throw ArgumentError("Expected at most " + std::to_string(most) +
                            " features beside weights of " + std::to_string(bits) +
                            " bits, so that accumulators fit 64 bits, got " + std::to_string(K) +
                            " (operator '" + (input ? "matmul.Wx" : "matmul.Rh") + "')");
}

// The inputs of a cell.
int64_t inputs_of(const GRUShape &shape, size_t index) {
    const auto D = static_cast<size_t>(shape.directions());
    return index < D ? shape.input_size : static_cast<int64_t>(D) * shape.hidden_size;
}

void add_cell(const Parameters &parameters, size_t index, const WeightNumbers &W,
              const WeightNumbers &R, TensorMap &to) {
    const GRUShape &shape = parameters.shape;
    const CellParameters &cell = parameters.cells[index];
    const auto D = static_cast<size_t>(shape.directions());
    const size_t layer = index / D;
    const std::string suffix = "_l" + std::to_string(layer) + (index % D ? "_reverse" : "");
    add_matrix(W, {"W", "Bw", "Mx", "kx"}, cell.config[Operator::W].bitwidth,
               inputs_of(shape, index), suffix, to);
    add_matrix(R, {"R", "Br", "Mh", "kh"}, cell.config[Operator::R].bitwidth, shape.hidden_size,
               suffix, to);
    const FrozenNumbers frozen = frozen_numbers(cell, shape.zoneout);
    to["cell" + suffix] = integers({frozen.one, W.bias_shift, R.bias_shift});
    const auto rule = static_cast<int64_t>(cell.config.rounding);
    const auto border = static_cast<int64_t>(cell.config.border_rounding());
    if (rule || border) to["rounding" + suffix] = integers({rule, border});
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        if (is_weight(op) || !cell.config[op].bitwidth) continue;
        const ActivationQuantizer &q = cell.quantizer(op);
        const std::string name = name_of(op) + suffix;
        to["quantizer." + name] = integers({q.lo(), q.hi(), q.zero_point});
        to["scale." + name] = float32(q.scale);
    }
    for (const auto &[op, sum] : frozen.sums)
        to["sum." + std::string(name_of(op)) + suffix] = integers(numbers_of(sum));
    if (frozen.zoneout) to["sum.zoneout" + suffix] = integers(numbers_of(*frozen.zoneout));
    for (Operator op : {Operator::z_out, Operator::r_out, Operator::g_out}) {
        const ActivationTable &t = cell.table(op);
        const std::string name = "table." + std::string(name_of(op)) + ".";
        const auto segments = static_cast<int64_t>(t.bounds.size());
        to[name + "bounds" + suffix] = compact(t.bounds, {segments});
        to[name + "coefficients" + suffix] = compact(t.coefficients, {segments, t.degree + 1});
        to[name + "numbers" + suffix] =
            integers({t.last, t.shift, t.zero_point, t.lo, t.hi, t.segment_shift});
    }
    if (!layer) return;
    std::vector<int64_t> between;
    for (size_t below = (layer - 1) * D; below < layer * D; ++below) {
        const double ratio = parameters.cells[below].quantizer(Operator::h).scale /
                             cell.quantizer(Operator::x).scale;
        for (int64_t number : numbers_of(one_term(ratio, 24))) between.push_back(number);
    }
    to["between" + suffix] = integers(between, {static_cast<int64_t>(D), 2});
}

// The bytes of a safetensors file. Tensors with larger elements come first, then by name.
std::string file_of(const TensorMap &tensors, const std::string &document, bool batch_first) {
    JsonWriter header(-1, true);
    header.begin('{').key("__metadata__").begin('{');
    header.member("format", "quant-gru-frozen").member("version", "1");
    header.member("batch_first", batch_first ? "true" : "false").member("document", document);
    header.end();
    std::string data;
    for (const char *dtype : {"I64", "F32", "I32", "I16", "I8", "U8"})
        for (const auto &[name, tensor] : tensors) {
            if (std::strcmp(tensor.dtype, dtype) != 0) continue;
            const auto begin = static_cast<int64_t>(data.size());
            data += tensor.bytes;
            header.key(name).begin('{').member("dtype", dtype).member("shape", tensor.shape);
            header.member("data_offsets",
                          std::vector<int64_t>{begin, static_cast<int64_t>(data.size())});
            header.end();
        }
    std::string text = header.end().text();
    text.append((8 - text.size() % 8) % 8, ' ');
    std::string file;
    for (size_t i = 0, size = text.size(); i < 8; ++i, size >>= 8)
        file += static_cast<char>(size & 0xFF);
    return file + text + data;
}

}  // namespace

std::string frozen_file(const Parameters &parameters, const std::vector<WeightNumbers> &weights,
                        bool batch_first) {
    TensorMap tensors;
    for (size_t i = 0; i < parameters.cells.size(); ++i)
        add_cell(parameters, i, weights[2 * i], weights[2 * i + 1], tensors);
    JsonWriter document(-1, true);
    write_document(parameters, document);
    return file_of(tensors, document.text(), batch_first);
}

std::string freeze(const Parameters &parameters, const std::vector<FloatCell> &cells,
                   bool batch_first) {
    if (cells.size() != parameters.cells.size())
        throw ArgumentError("Expected weights of " + std::to_string(parameters.cells.size()) +
                            " cells, got " + std::to_string(cells.size()));
    std::vector<WeightNumbers> weights;
    for (size_t i = 0; i < cells.size(); ++i) {
        const CellParameters &cell = parameters.cells[i];
        const int64_t H = parameters.shape.hidden_size;
        for (auto [weight, K] :
             {std::pair(Operator::W, inputs_of(parameters.shape, i)), std::pair(Operator::R, H)}) {
            check_inputs(cell, weight, K);
            weights.push_back(
                weight_numbers(cell, weight, weight_codes(cell, weight, cells[i], H, K)));
        }
    }
    return frozen_file(parameters, weights, batch_first);
}

}  // namespace quant_gru
