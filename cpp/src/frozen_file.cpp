#include "frozen_file.hpp"

#include <array>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "number_rules.hpp"
#include "packed_file.hpp"
#include "rounding_names.hpp"
#include "safetensors.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kLargestSize = int64_t{1} << 24;

template <class T>
T element(const Tensor &tensor, int64_t i) {
    T value;
    std::memcpy(&value, tensor.data + static_cast<size_t>(i) * sizeof value, sizeof value);
    return value;
}

int64_t integer(const Tensor &tensor, int64_t i) {
    switch (tensor.dtype) {
        case Dtype::i8:
            return element<int8_t>(tensor, i);
        case Dtype::u8:
            return element<uint8_t>(tensor, i);
        case Dtype::i16:
            return element<int16_t>(tensor, i);
        case Dtype::i32:
            return element<int32_t>(tensor, i);
        default:
            return element<int64_t>(tensor, i);
    }
}

std::string text_of(const std::vector<int64_t> &shape) {
    std::string text = "(";
    for (int64_t each : shape) text += std::to_string(each) + ", ";
    return text + ")";
}

// The tensors of a file. Each one is used once or more.
class Tensors {
 public:
    explicit Tensors(const Safetensors &file) : file_(file) {}

    bool has(const std::string &name) const { return file_.tensors.count(name) > 0; }

    // A tensor of this shape; -1 for sizes that may have any value from 1 on.
    const Tensor &at(const std::string &name, const std::vector<int64_t> &shape, bool integers) {
        const auto found = file_.tensors.find(name);
        if (found == file_.tensors.end())
            throw FileError("Expected tensor '" + name + "', got none");
        used_.insert(name);
        const Tensor &tensor = found->second;
        bool fits = tensor.shape.size() == shape.size() && tensor.count > 0;
        for (size_t i = 0; fits && i < shape.size(); ++i)
            fits = shape[i] < 0 || tensor.shape[i] == shape[i];
        if (!fits)
            throw FileError("Expected tensor '" + name + "' to have the shape " + text_of(shape) +
                            ", got " + text_of(tensor.shape));
        if ((tensor.dtype != Dtype::f32) != integers)
            throw FileError("Expected tensor '" + name + "' to contain " +
                            (integers ? "integers" : "float32 numbers"));
        return tensor;
    }

    std::vector<int64_t> integers(const std::string &name, const std::vector<int64_t> &shape) {
        const Tensor &tensor = at(name, shape, true);
        std::vector<int64_t> values(static_cast<size_t>(tensor.count));
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = integer(tensor, static_cast<int64_t>(i));
        return values;
    }

    void check_all_used() const {
        for (const auto &each : file_.tensors)
            if (!used_.count(each.first))
                throw FileError("Expected no tensor but those of a frozen GRU, got '" +
                                each.first.substr(0, 80) + "'");
    }

 private:
    const Safetensors &file_;
    std::set<std::string> used_;
};

// Reads the tensors of one layer and direction, whose names end in a suffix.
class CellReader {
 public:
    CellReader(Tensors &tensors, std::string suffix, FrozenCell &cell)
        : tensors_(tensors), suffix_(std::move(suffix)), cell_(cell), n_(cell.numbers) {}

    void read(int64_t H, int64_t C, const std::array<int, 2> &weight_bits,
              const std::array<int, 2> &rules, bool is_first) {
        n_.H = static_cast<int>(H);
        n_.rounding = rules[0];
        n_.rounding_input = rules[1];
        read_quantizers(is_first);
        const auto numbers = integers("cell", {3});
        n_.one = numbers[0];
        check_range({n_.one}, 1, int64_t{1} << 60, "'one' in " + cell_name());
        read_sums();
        n_.tables.z = table("gate.z_out", n_.z_pre, n_.z);
        n_.tables.r = table("gate.r_out", n_.r_pre, n_.r);
        n_.tables.g = table("gate.g_out", n_.g_pre, n_.g);
        n_.W = matrix('W', C, weight_bits[0], n_.x);
        n_.R = matrix('R', H, weight_bits[1], n_.h);
        for (const auto &[found, weights, operand] :
             {std::tuple(numbers[1], &n_.W, &n_.x), std::tuple(numbers[2], &n_.R, &n_.h)})
            if (found != bias_shift(weights->weight_bits, operand->bits))
                throw FileError("Expected the bias shifts in " + cell_name() +
                                " to follow from its widths, got " + std::to_string(found));
        check_sums(n_, cell_name());
    }

    // The sums that convert the states of the layer below.
    void read_between(int64_t directions) {
        const auto values = integers("between", {directions, 2});
        for (size_t i = 0; i < values.size(); i += 2) {
            cell_.between.push_back({1, values[i], {values[i + 1], 0}});
            check_sum(cell_.between.back(), "'between" + suffix_ + "'");
        }
    }

 private:
    std::string cell_name() const { return "'cell" + suffix_ + "'"; }

    std::vector<int64_t> integers(const std::string &name, const std::vector<int64_t> &shape) {
        return tensors_.integers(name + suffix_, shape);
    }

    const int64_t *kept(std::vector<int64_t> values) {
        cell_.arrays.push_back(std::move(values));
        return cell_.arrays.back().data();
    }

    QuantizerNumbers quantizer(const std::string &name, bool far = false) {
        const auto limits = integers("quantizer." + name, {3});
        const float scale = element<float>(tensors_.at("scale." + name + suffix_, {1}, false), 0);
        return checked_quantizer(limits[0], limits[1], limits[2], scale,
                                 "'quantizer." + name + suffix_ + "'", far);
    }

    void read_quantizers(bool is_first) {
        n_.x = quantizer("input.x", is_first);
        n_.h = quantizer("output.h");
        n_.Wx = quantizer("matmul.Wx");
        n_.Rh = quantizer("matmul.Rh");
        n_.z_pre = quantizer("gate.z_pre");
        n_.r_pre = quantizer("gate.r_pre");
        n_.g_pre = quantizer("gate.g_pre");
        n_.z = quantizer("gate.z_out");
        n_.r = quantizer("gate.r_out");
        n_.g = quantizer("gate.g_out");
    }

    SumNumbers sum(const std::string &name, int terms) {
        const auto values = integers("sum." + name, {terms + 1});
        SumNumbers found{terms, values[0], {values[1], terms > 1 ? values[2] : 0}};
        check_sum(found, "'sum." + name + suffix_ + "'");
        return found;
    }

    // A product is fused if it has no quantizer.
    void product(const std::string &name, QuantizerNumbers &q, SumNumbers &s) {
        if (!tensors_.has("quantizer." + name + suffix_)) return;
        q = quantizer(name);
        s = sum(name, 1);
    }

    void read_sums() {
        product("op.rRh", n_.rRh, n_.sums.rRh);
        product("op.old_contrib", n_.old_contrib, n_.sums.old_contrib);
        product("op.new_contrib", n_.new_contrib, n_.sums.new_contrib);
        n_.sums.z_pre = sum("gate.z_pre", 2);
        n_.sums.r_pre = sum("gate.r_pre", 2);
        n_.sums.g_pre = sum("gate.g_pre", 2);
        n_.sums.h = sum("output.h", 2);
        if (tensors_.has("sum.zoneout" + suffix_)) n_.sums.zoneout = sum("zoneout", 2);
    }

    TableNumbers table(const std::string &name, const QuantizerNumbers &pre,
                       const QuantizerNumbers &out) {
        const std::string prefix = "table." + name;
        const auto numbers = integers(prefix + ".numbers", {6});
        check_range({numbers[1], numbers[5]}, -1, 64, "'" + prefix + ".numbers" + suffix_ + "'");
        TableNumbers t;
        t.last = numbers[0];
        t.shift = static_cast<int>(numbers[1]);
        t.zero = numbers[2];
        t.lo = numbers[3];
        t.hi = numbers[4];
        t.segment_shift = static_cast<int>(numbers[5]);
        auto bounds = integers(prefix + ".bounds", {-1});
        t.segments = static_cast<int64_t>(bounds.size());
        check_range({t.segments}, 1, kLargestSize,
                    "the length of '" + prefix + ".bounds" + suffix_ + "'");
        t.bounds = kept(std::move(bounds));
        auto coefficients = integers(prefix + ".coefficients", {t.segments, -1});
        const int64_t columns = static_cast<int64_t>(coefficients.size()) / t.segments;
        check_range({columns}, 1, 3, "the columns of '" + prefix + ".coefficients" + suffix_ + "'");
        t.degree = static_cast<int>(columns) - 1;
        t.coefficients = kept(std::move(coefficients));
        check_table(t, pre, out, "'" + prefix + suffix_ + "'");
        return t;
    }

    MatrixNumbers matrix(char name, int64_t inputs, int bits, const QuantizerNumbers &operand) {
        const std::string letter(1, name);
        const std::string row = name == 'W' ? "x" : "h";
        const int64_t rows = 3 * int64_t{n_.H};
        MatrixNumbers m;
        m.inputs = static_cast<int>(inputs);
        m.weight_bits = bits;
        read_codes(letter, rows, m);
        const int64_t limit = bias_limit(m.weight_bits, operand.bits);
        const int p = significant_bits(m.weight_bits + operand.bits);
        m.bias = ranged(name == 'W' ? "Bw" : "Br", rows, -limit, limit);
        m.M = ranged("M" + row, rows, int64_t{1} << (p - 1), (int64_t{1} << p) - 1);
        m.k = ranged("k" + row, rows, -600, 600);
        return m;
    }

    const int64_t *ranged(const std::string &name, int64_t rows, int64_t least, int64_t most) {
        auto values = integers(name, {rows});
        check_range(values, least, most, "'" + name + suffix_ + "'");
        return kept(std::move(values));
    }

    void read_codes(const std::string &name, int64_t rows, MatrixNumbers &m) {
        const Tensor &tensor = tensors_.at(name + suffix_, {rows, m.inputs}, true);
        const QuantizerNumbers codes{m.weight_bits, true, 1, 0};
        m.kind = codes.container();
        const Dtype dtype = m.kind == Container::i8    ? Dtype::i8
                            : m.kind == Container::i16 ? Dtype::i16
                                                       : Dtype::i32;
        if (tensor.dtype != dtype)
            throw FileError("Expected the dtype of tensor '" + name + suffix_ + "' to be that of " +
                            std::to_string(m.weight_bits) + " bits");
        for (int64_t i = 0; i < tensor.count; ++i) {
            const int64_t code = integer(tensor, i);
            if (code < codes.lo() || code > codes.hi())
                throw FileError("Expected tensor '" + name + suffix_ + "' to have codes of " +
                                std::to_string(m.weight_bits) + " bits, got " +
                                std::to_string(code));
        }
        const size_t bytes = static_cast<size_t>(tensor.count) * size_of(dtype);
        cell_.codes.push_back(std::make_unique<Aligned>(bytes));
        m.codes = cell_.codes.back()->data;
        std::memcpy(cell_.codes.back()->data, tensor.data, bytes);
    }

    Tensors &tensors_;
    std::string suffix_;
    FrozenCell &cell_;
    CellNumbers &n_;
};

// Returns the version.
char checked_version(const Json &metadata) {
    const std::string &format = metadata.at("format").string("format");
    if (format != "quant-gru-frozen")
        throw FileError("Expected format 'quant-gru-frozen' in the metadata, got '" +
                        format.substr(0, 80) + "'");
    const std::string &version = metadata.at("version").string("version");
    if (version != "1" && version != "2")
        throw FileError("Expected version '1' or '2' in the metadata, got '" +
                        version.substr(0, 80) + "'");
    return version[0];
}

// The widths of W and R of a cell of a whole document.
std::array<int, 2> weight_bits(const Json &cell) {
    const auto bits = [&cell](const std::string &weight) {
        const Json &width = cell.at("operators").at(weight).at("bitwidth");
        return static_cast<int>(width.integer("bitwidth of " + weight, 1, 32));
    };
    return {bits("weight.W"), bits("weight.R")};
}

// The rule of sums, and that of real values: without one it is the same, or half away from zero
// beside the two steps. Settings of files that know no rules have none.
std::array<int, 2> rules_of(const Json &document) {
    const Json &settings = document.at("config").at("GRU_config").at("default_config");
    const auto rule = [&settings](const std::string &key, int otherwise, int last) {
        const Json *found = settings.find(key);
        if (!found || found->is_null()) return otherwise;
        const std::string &name = found->string(key);
        for (int i = 0; i <= last; ++i)
            if (name == kRoundings[i]) return i;
        throw FileError("Expected " + key + " to be a rule of rounding, got '" +
                        name.substr(0, 80) + "'");
    };
    const int sums = rule("rounding", QG_HALF_EVEN, QG_DOUBLE);
    const int same = sums == QG_DOUBLE ? QG_HALF_AWAY : sums;
    return {sums, rule("rounding_input", same, QG_FLOOR)};
}

Shape shape_of(const Json &metadata, const Json &document) {
    const Json &gru = document.at("gru");
    auto size = [&](const char *key) { return gru.at(key).integer(key, 1, kLargestSize); };
    Shape shape;
    shape.input_size = size("input_size");
    shape.hidden_size = size("hidden_size");
    shape.num_layers = size("num_layers");
    shape.directions = gru.at("bidirectional").boolean("bidirectional") ? 2 : 1;
    const std::string &flag = metadata.at("batch_first").string("batch_first");
    if (flag != "true" && flag != "false")
        throw FileError("Expected 'batch_first' in the metadata to be 'true' or 'false'");
    shape.batch_first = flag == "true";
    return shape;
}

}  // namespace

FrozenGRU read_frozen(const void *bytes, size_t size) {
    Expanded all;
    all.file = read_safetensors(bytes, size);
    const Json &metadata = all.file.metadata;
    if (metadata.is_null()) throw FileError("Expected '__metadata__' in the header, got none");
    const char version = checked_version(metadata);
    const Json document = Json::parse(metadata.at("document").string("document"));
    FrozenGRU gru;
    gru.shape = shape_of(metadata, document);
    const int64_t D = gru.shape.directions, H = gru.shape.hidden_size;
    const Json::Array &cells = document.at("cells").array("cells");
    if (static_cast<int64_t>(cells.size()) != gru.shape.num_layers * D)
        throw FileError("Expected " + std::to_string(gru.shape.num_layers * D) + " cells, got " +
                        std::to_string(cells.size()));
    if (version == '2')
        all = expanded(all.file, document, gru.shape);
    else
        for (const Json &cell : cells) all.weight_bits.push_back(weight_bits(cell));
    const auto rules = rules_of(document);
    Tensors tensors(all.file);
    gru.cells.resize(cells.size());
    for (size_t i = 0; i < cells.size(); ++i) {
        const auto index = static_cast<int64_t>(i);
        const int64_t layer = index / D;
        const std::string suffix = "_l" + std::to_string(layer) + (index % D ? "_reverse" : "");
        CellReader reader(tensors, suffix, gru.cells[i]);
        reader.read(H, layer ? D * H : gru.shape.input_size, all.weight_bits[i], rules, !layer);
        if (layer) reader.read_between(D);
    }
    tensors.check_all_used();
    return gru;
}

}  // namespace quant_gru
