// The file of a frozen GRU, with the bytes that Python writes.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "columns.hpp"
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

TensorBytes bytes_of(std::string bytes) {
    const auto size = static_cast<int64_t>(bytes.size());
    return {"U8", 1, {size}, std::move(bytes)};
}

// Codes (rows, K): as they are where they fill their containers, otherwise without gaps.
TensorBytes codes_of(const std::vector<int64_t> &codes, int64_t rows, int64_t K, int bits) {
    if (bits == 8) return tensor_of<int8_t>("I8", codes, {rows, K});
    if (bits == 16) return tensor_of<int16_t>("I16", codes, {rows, K});
    if (bits == 32) return tensor_of<int32_t>("I32", codes, {rows, K});
    std::string packed;
    pack_bits(codes, bits, packed);
    return bytes_of(std::move(packed));
}

void add_numbers(const Multipliers &sum, std::vector<int64_t> &to) {
    to.push_back(sum.k);
    to.insert(to.end(), sum.M.begin(), sum.M.end());
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
    const auto rows = static_cast<int64_t>(W.M.size());
    to["W" + suffix] =
        codes_of(W.codes, rows, inputs_of(shape, index), cell.config[Operator::W].bitwidth);
    to["R" + suffix] =
        codes_of(R.codes, rows, shape.hidden_size, cell.config[Operator::R].bitwidth);
    std::string columns;
    for (const auto *each : {&W.bias, &R.bias, &W.M, &W.k, &R.M, &R.k}) add_column(*each, columns);
    const FrozenNumbers frozen = frozen_numbers(cell, shape.zoneout);
    std::vector<int64_t> sums = {frozen.one};
    for (const auto &each : frozen.sums) add_numbers(each.second, sums);
    if (frozen.zoneout) add_numbers(*frozen.zoneout, sums);
    for (size_t below = layer ? (layer - 1) * D : 0; below < layer * D; ++below) {
        const double ratio = parameters.cells[below].quantizer(Operator::h).scale /
                             cell.quantizer(Operator::x).scale;
        add_numbers(one_term(ratio, 24), sums);
    }
    add_column(sums, columns);
    to["integers" + suffix] = bytes_of(std::move(columns));
}

// The bytes of a safetensors file. Tensors with larger elements come first, then by name.
std::string file_of(const TensorMap &tensors, const std::string &document, bool batch_first) {
    JsonWriter header(-1, true);
    header.begin('{').key("__metadata__").begin('{');
    header.member("format", "quant-gru-frozen").member("version", "2");
    header.member("batch_first", batch_first ? "true" : "false").member("document", document);
    header.end();
    std::string data;
    for (const char *dtype : {"I32", "I16", "I8", "U8"})
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

// W and R of each cell.
std::vector<WeightNumbers> numbers_of(const Parameters &parameters,
                                      const std::vector<FloatCell> &cells) {
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
    return weights;
}

}  // namespace

std::string frozen_file(const Parameters &parameters, const std::vector<WeightNumbers> &weights,
                        bool batch_first) {
    TensorMap tensors;
    for (size_t i = 0; i < parameters.cells.size(); ++i)
        add_cell(parameters, i, weights[2 * i], weights[2 * i + 1], tensors);
    JsonWriter document(-1, true);
    tensors["columns"] = bytes_of(write_packed_document(parameters, document));
    return file_of(tensors, document.text(), batch_first);
}

std::string freeze(const Parameters &parameters, const std::vector<FloatCell> &cells,
                   bool batch_first) {
    return frozen_file(parameters, numbers_of(parameters, cells), batch_first);
}

std::vector<CutBiases> cut_biases(const Parameters &parameters,
                                  const std::vector<FloatCell> &cells) {
    std::vector<CutBiases> found;
    const auto weights = numbers_of(parameters, cells);
    for (size_t i = 0; i < weights.size(); ++i) {
        const bool input = i % 2 == 0;
        const CellParameters &cell = parameters.cells[i / 2];
        const int64_t limit = bias_limit(cell.config[input ? Operator::W : Operator::R].bitwidth,
                                         cell.quantizer(input ? Operator::x : Operator::h).bits);
        const auto &biases = weights[i].bias;
        const auto count = std::count_if(biases.begin(), biases.end(),
                                         [limit](int64_t b) { return b >= limit || b <= -limit; });
        if (count) found.push_back({i / 2, input ? Operator::bw : Operator::br, count});
    }
    return found;
}

}  // namespace quant_gru
