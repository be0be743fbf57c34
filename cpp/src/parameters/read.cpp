#include <algorithm>
#include <cmath>
#include <limits>

#include "config/config_json.hpp"
#include "files.hpp"
#include "parameters/document.hpp"
#include "parameters/operator_rules.hpp"
#include "parameters/quant_gru_pytorch.hpp"
#include "plan/tables.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int kSamples = 257;

// Raises unless an object has exactly these keys; those from `optional` on may be absent.
void check_keys(const Json &json, const std::vector<std::string> &keys, const std::string &what,
                size_t optional) {
    for (const auto &member : json.object(what))
        if (std::find(keys.begin(), keys.end(), member.first) == keys.end())
            throw FileError("Expected a known key of " + what + ", got '" + member.first + "'");
    for (size_t i = 0; i < optional; ++i) json.at(keys[i]);
}

int64_t integer(const Json &json, const char *key) {
    return json.at(key).integer(std::string("'") + key + "'", kLeast, kMost);
}

GRUShape read_shape(const Json &json) {
    check_keys(json,
               {"input_size", "hidden_size", "num_layers", "bias", "bidirectional", "zoneout"},
               "'gru'", 5);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    GRUShape shape;
    shape.input_size = json.at("input_size").integer("input_size", 1, most);
    shape.hidden_size = json.at("hidden_size").integer("hidden_size", 1, most);
    shape.num_layers = json.at("num_layers").integer("num_layers", 1, most);
    shape.bias = json.at("bias").boolean("bias");
    shape.bidirectional = json.at("bidirectional").boolean("bidirectional");
    if (const Json *zoneout = json.find("zoneout")) shape.zoneout = zoneout->real("zoneout");
    if (!(shape.zoneout >= 0 && shape.zoneout <= 1))
        throw FileError("Expected zoneout to be in [0, 1], got " + shortest(shape.zoneout));
    return shape;
}

// Reads one operator of a cell.
class OperatorReader {
 public:
    // far: whether the zero point may be no code.
    OperatorReader(const Json &json, Operator op, CellParameters &cell, int64_t H, bool far)
        : json_(json), op_(op), cell_(cell), H_(H), far_(far) {}

    void read() {
        check_keys(json_,
                   {"bitwidth", "is_symmetric", "is_unsigned", "scale", "zero_point", "exp2_inv",
                    "granularity"},
                   "an operator", 3);
        OperatorConfig &config = cell_.config[op_];
        const Json &bits = json_.at("bitwidth");
        config.bitwidth = bits.is_null() && is_fusible(op_)
                              ? 0
                              : static_cast<int>(bits.integer("bitwidth", 1, 32));
        config.is_symmetric = json_.at("is_symmetric").boolean("is_symmetric");
        config.is_unsigned = json_.at("is_unsigned").boolean("is_unsigned");
        if (is_weight(op_)) return read_weight(config);
        absent("granularity");
        if (!config.bitwidth) {
            for (const char *key : {"scale", "zero_point", "exp2_inv"}) absent(key);
            return;
        }
        read_quantizer();
    }

 private:
    const Json *given(const char *key) const {
        const Json *found = json_.find(key);
        return found && !found->is_null() ? found : nullptr;
    }

    void absent(const char *key) const {
        if (given(key))
            throw FileError("Expected " + std::string(key) + " to be null, got a value");
    }

    void read_weight(OperatorConfig &config) {
        for (const char *key : {"zero_point", "exp2_inv"}) absent(key);
        if (!config.is_symmetric || config.is_unsigned)
            throw FileError("Expected weights and biases to be symmetric and signed");
        config.granularity = Granularity::channel;
        if (const Json *json = given("granularity")) {
            const auto *name =
                std::find(kGranularities, kGranularities + 3, json->string("granularity"));
            if (name == kGranularities + 3)
                throw FileError("Expected granularity to be 'tensor', 'gate' or 'channel', got '" +
                                json->string("granularity") + "'");
            config.granularity = static_cast<Granularity>(name - kGranularities);
        }
        const Json *scale = given("scale");
        if (!scale) return;
        std::vector<double> scales;
        for (const Json &each : scale->array("scale")) scales.push_back(each.real("scale"));
        set_pinned(cell_, op_, std::move(scales), H_);
    }

    void read_quantizer() {
        const Json *scale = given("scale"), *zero = given("zero_point");
        if (!scale || !zero)
            throw FileError("Expected scale and zero_point to be numbers, got null");
        const double value = scale->real("scale");
        set_quantizer(cell_, op_, value, zero->integer("zero_point", kLeast, kMost), far_);
        if (const Json *exponent = given("exp2_inv"))
            if (!is_power_of_two(value) || std::ldexp(1.0, -static_cast<int>(exponent->integer(
                                                               "exp2_inv", -200, 200))) != value)
                throw FileError("Expected scale to be 2^-exp2_inv, got " + shortest(value));
    }

    const Json &json_;
    Operator op_;
    CellParameters &cell_;
    int64_t H_;
    bool far_;
};

ActivationTable read_table(const Json &json) {
    check_keys(
        json,
        {"bounds", "last", "coefficients", "shift", "zero_point", "lo", "hi", "segment_shift"},
        "a table", 8);
    ActivationTable table;
    for (const Json &each : json.at("bounds").array("bounds"))
        table.bounds.push_back(each.integer("a bound", kLeast, kMost));
    size_t width = 0;
    const auto &rows = json.at("coefficients").array("coefficients");
    for (const Json &row : rows) {
        const auto &values = row.array("a row of coefficients");
        if (width == 0) width = values.size();
        if (values.size() != width || width < 1 || width > 3)
            throw FileError("Expected rows of 1 to 3 coefficients each, got " +
                            std::to_string(values.size()));
        for (const Json &each : values)
            table.coefficients.push_back(each.integer("a coefficient", kLeast, kMost));
    }
    if (table.bounds.empty() || rows.size() != table.bounds.size())
        throw FileError("Expected one row of coefficients for each bound, got " +
                        std::to_string(rows.size()));
    table.degree = static_cast<int>(width) - 1;
    table.last = integer(json, "last");
    table.shift = static_cast<int>(json.at("shift").integer("shift", 0, 62));
    table.zero_point = integer(json, "zero_point");
    table.lo = integer(json, "lo");
    table.hi = integer(json, "hi");
    const Json &u = json.at("segment_shift");
    table.segment_shift = u.is_null() ? -1 : static_cast<int>(u.integer("segment_shift", 0, 32));
    return table;
}

void check_table(const ActivationTable &t, const ActivationQuantizer &pre,
                 const ActivationQuantizer &out) {
    const size_t n = t.bounds.size();
    bool ascends = pre.lo() <= t.bounds[0] && t.bounds[n - 1] <= t.last && t.last <= pre.hi();
    for (size_t i = 1; i < n; ++i) ascends = ascends && t.bounds[i - 1] < t.bounds[i];
    if (!ascends)
        throw FileError("Expected ascending bounds in [" + std::to_string(pre.lo()) + ", " +
                        std::to_string(pre.hi()) + "], got others");
    if (t.zero_point != out.zero_point || !(out.lo() <= t.lo && t.lo <= t.hi && t.hi <= out.hi()))
        throw FileError("Expected the table's outputs to be codes in [" + std::to_string(out.lo()) +
                        ", " + std::to_string(out.hi()) + "], got others");
    for (size_t i = 0; i < n; ++i) {
        const int64_t end = i + 1 < n ? t.bounds[i + 1] : t.last + 1;
        const long double length = static_cast<long double>(end - t.bounds[i]);
        long double sum = 0, power = 1;
        for (int p = 0; p <= t.degree; ++p, power *= length)
            sum += std::fabs(static_cast<long double>(
                       t.coefficients[i * static_cast<size_t>(t.degree + 1) +
                                      static_cast<size_t>(p)])) *
                   power;
        if (!(sum < 0x1p62L)) throw FileError("Expected sums below 2^62, got larger ones");
    }
    if (t.segment_shift < 0) return;
    bool even = t.last - t.bounds[n - 1] < int64_t{1} << t.segment_shift;
    for (size_t i = 0; i < n; ++i)
        even = even && t.bounds[i] - t.bounds[0] == static_cast<int64_t>(i) << t.segment_shift;
    if (!even)
        throw FileError("Expected segments of 2^" + std::to_string(t.segment_shift) +
                        " codes, got others");
}

// Raises if an exact table deviates from its function, for example if it was swapped.
void check_curve(const ActivationTable &table, Operator op, const ActivationQuantizer &pre,
                 const ActivationQuantizer &out) {
    const double step = static_cast<double>(pre.hi() - pre.lo()) / (kSamples - 1);
    for (int i = 0; i < kSamples; ++i) {
        const int64_t code =
            std::min(pre.lo() + static_cast<int64_t>(static_cast<double>(i) * step), pre.hi());
        const auto off = std::abs(table(code) - float_table(op, pre, out, code));
        if (off > 1 && static_cast<double>(off) * out.scale > 1e-3)
            throw FileError("Expected the table to follow its function, got one that is off");
    }
}

std::vector<double> read_mean(const Json &cell, int64_t version, int64_t features) {
    std::vector<double> found;
    const Json *mean = cell.find("input_mean");
    if (!mean || mean->is_null()) return found;
    if (version == 1) throw FileError("Expected version to be 2 with input_mean, got 1");
    check_keys(*mean, {"exp2_inv", "values"}, "'input_mean'", 2);
    const auto exp2_inv = static_cast<int>(mean->at("exp2_inv").integer("exp2_inv", -127, 149));
    constexpr int64_t most = int64_t{1} << 24;
    for (const Json &each : mean->at("values").array("values")) {
        const double value = std::ldexp(
            static_cast<double>(each.integer("a value of input_mean", -most, most)), -exp2_inv);
        if (!(std::fabs(value) <= std::numeric_limits<float>::max()) ||
            static_cast<double>(static_cast<float>(value)) != value)
            throw FileError("Expected input_mean to be float32 numbers, got " + shortest(value));
        found.push_back(value);
    }
    if (static_cast<int64_t>(found.size()) != features)
        throw FileError("Expected input_mean of " + std::to_string(features) + " features, got " +
                        std::to_string(found.size()));
    return found;
}

CellParameters read_cell(const Json &json, const QuantConfig &config, const GRUShape &shape,
                         bool is_first) {
    CellParameters cell;
    cell.config = config;
    std::vector<std::string> names;
    for (int i = 0; i < kOperators; ++i) names.push_back(name_of(static_cast<Operator>(i)));
    const Json &operators = json.at("operators"), &tables = json.at("tables");
    check_keys(operators, names, "'operators'", names.size());
    check_keys(tables, {"gate.z_out", "gate.r_out", "gate.g_out"}, "'tables'", 3);
    std::string at;
    try {
        std::array<double, kOperators> given{};
        for (int i = 0; i < kOperators; ++i) {
            at = names[static_cast<size_t>(i)];
            const auto op = static_cast<Operator>(i);
            const bool far = op == Operator::x && is_first && config.input_excludes_zero;
            OperatorReader(operators.at(at), op, cell, shape.hidden_size, far).read();
            if (is_sigmoid(op))
                given[static_cast<size_t>(i)] = operators.at(at).at("scale").real("scale");
        }
        const std::pair<Operator, Operator> pairs[] = {{Operator::z_out, Operator::z_pre},
                                                       {Operator::r_out, Operator::r_pre},
                                                       {Operator::g_out, Operator::g_pre}};
        for (size_t i = 0; i < 3; ++i) {
            const auto [op, before] = pairs[i];
            const auto &pre = cell.quantizer(before), &out = cell.quantizer(op);
            at = name_of(op);
            cell.tables[i] = read_table(tables.at(at));
            cell.tables[i].rounding = config.rounding;
            check_table(cell.tables[i], pre, out);
            if (is_sigmoid(op) && given[static_cast<size_t>(op)] != out.scale)
                cell.tables[i] =
                    build_table(op, pre, out, config.activation, config.segments, config.rounding);
            else if (config.activation == Activation::exact)
                check_curve(cell.tables[i], op, pre, out);
        }
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (operator '" + at + "')");
    }
    return cell;
}

}  // namespace

Parameters read_document(const Json &document, const std::string &where) {
    if (is_of_quant_gru_pytorch(document)) return read_quant_gru_pytorch(document, where);
    try {
        check_keys(document, {"format", "version", "gru", "config", "cells"},
                   "the parameter document", 5);
        if (document.at("format").string("format") != "quant-gru-params")
            throw FileError("Expected format to be 'quant-gru-params', got '" +
                            document.at("format").string("format") + "'");
        const int64_t version = document.at("version").integer("version", 1, 2);
        Parameters found;
        found.shape = read_shape(document.at("gru"));
        found.config = read_config(document.at("config"), "in config");
        if (version == 1) found.config.correct_bias = false;  // without means
        const auto &cells = document.at("cells").array("cells");
        const auto D = static_cast<size_t>(found.shape.directions());
        if (static_cast<int64_t>(cells.size()) != found.shape.num_layers * static_cast<int64_t>(D))
            throw FileError("Expected one cell for each layer and direction, got " +
                            std::to_string(cells.size()));
        for (size_t i = 0; i < cells.size(); ++i) {
            check_keys(cells[i], {"layer", "reverse", "operators", "tables", "input_mean"},
                       "a cell", 4);
            const auto layer = static_cast<int64_t>(i / D);
            cells[i].at("layer").integer("layer", layer, layer);
            if (cells[i].at("reverse").boolean("reverse") != (i % D == 1))
                throw FileError("Expected cells in the order of layers and directions");
            try {
                found.cells.push_back(read_cell(cells[i], found.config, found.shape, !layer));
                const int64_t features = layer ? static_cast<int64_t>(D) * found.shape.hidden_size
                                               : found.shape.input_size;
                found.cells.back().input_mean = read_mean(cells[i], version, features);
            } catch (const FileError &error) {
                throw FileError(std::string(error.what()) + " (layer " + std::to_string(layer) +
                                (i % D ? ", reverse)" : ")"));
            }
        }
        return found;
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (" + where + ")");
    }
}

Parameters Parameters::from_text(const std::string &text, const std::string &where) {
    Json document;
    try {
        document = Json::parse(checked_utf8(text));
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (" + where + ")");
    }
    return read_document(document, where);
}

Parameters Parameters::load(const std::string &path) {
    return from_text(read_file(path), "file '" + path + "'");
}

}  // namespace quant_gru
