#include "parameters/quant_gru_pytorch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "config/quant_gru_pytorch.hpp"
#include "json_writer.hpp"
#include "parameters/operator_rules.hpp"
#include "plan/cell_plan.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// Operators of older versions that are part of others here.
const char *const kParts[] = {"Rh_add_br", "one_minus_update", "sub_one_minus_update"};

struct Entry {
    std::string name;  // in the file
    OperatorConfig config;
    std::vector<double> scales;  // float32 numbers
    int64_t zero_point = 0;
};

using Entries = std::array<Entry, kOperators>;

std::vector<const Json *> list_of(const Json &json) {
    std::vector<const Json *> found;
    if (!json.is_array()) return {&json};
    for (const Json &each : json.array("")) found.push_back(&each);
    return found;
}

// Sets width and sign from "INT8" or "UINT16".
void read_type(const Json &json, OperatorConfig &to) {
    const std::string &text = json.at("dtype").string("dtype");
    to.is_unsigned = text[0] == 'U';
    const std::string kind = to.is_unsigned ? text.substr(1) : text;
    const std::string digits = kind.size() > 3 ? kind.substr(3) : "";
    if (kind.compare(0, 3, "INT") != 0 || digits.empty() || digits.size() > 2 ||
        digits.find_first_not_of("0123456789") != std::string::npos)
        throw FileError("Expected dtype to be INT or UINT with a width, got '" + text + "'");
    to.bitwidth = std::stoi(digits);
    if (to.bitwidth < 1 || to.bitwidth > 32)
        throw FileError("Expected a width of 1 to 32 bits, got " + text);
}

std::vector<double> read_scales(const Json &json) {
    std::vector<double> found;
    const Json *scale = json.find("scale"), *exponents = json.find("n");
    if ((!scale || scale->is_null()) && exponents) {
        for (const Json *n : list_of(*exponents))
            found.push_back(std::ldexp(1.0, -static_cast<int>(n->integer("n", -127, 126))));
        return found;
    }
    for (const Json *each : list_of(json.at("scale"))) {
        const double value = each->real("scale");
        if (!(value > 0 && std::isfinite(value)))
            throw FileError("Expected scales to be positive numbers, got " + shortest(value));
        found.push_back(static_cast<double>(static_cast<float>(value)));
    }
    return found;
}

Entry read_entry(const Json &json, Operator op, const std::string &name) {
    Entry to;
    to.name = name;
    read_type(json, to.config);
    if (const Json *symmetric = json.find("symmetric"))
        to.config.is_symmetric = symmetric->boolean("symmetric");
    to.scales = read_scales(json);
    std::vector<int64_t> points = {0};
    if (const Json *zero = json.find("zero_point")) {
        points.clear();
        for (const Json *each : list_of(*zero))
            points.push_back(each->integer("zero_point", std::numeric_limits<int64_t>::min(),
                                           std::numeric_limits<int64_t>::max()));
    }
    if (is_weight(op)) {
        if (std::any_of(points.begin(), points.end(), [](int64_t z) { return z != 0; }) ||
            to.config.is_unsigned || !to.config.is_symmetric)
            throw FileError("Expected weights and biases to be signed and symmetric");
        const size_t count = to.scales.size();
        to.config.granularity = count == 1   ? Granularity::tensor
                                : count == 3 ? Granularity::gate
                                             : Granularity::channel;
        return to;
    }
    if (to.scales.size() != 1 || points.size() != 1)
        throw FileError("Expected one scale and zero_point, got " +
                        std::to_string(to.scales.size()) + " and " + std::to_string(points.size()));
    to.zero_point = points[0];
    return to;
}

// The operator of a name of any generation.
Operator any_operator(const std::string &name) {
    const std::string newer = from_newer_name(name);
    try {
        return operator_of(newer.empty() ? name : newer);
    } catch (const ArgumentError &error) {
        throw FileError(error.what());
    }
}

Entries read_entries(const Json &document, const std::string &section) {
    std::array<bool, kOperators> given{};
    Entries found;
    std::string at = section;
    try {
        for (const auto &[name, json] : document.at(section).object("'" + section + "'")) {
            if (std::find(std::begin(kParts), std::end(kParts), name) != std::end(kParts)) continue;
            at = "operator '" + name + "', " + section;
            const auto index = static_cast<size_t>(any_operator(name));
            if (given[index])
                throw FileError("Expected operator '" +
                                std::string(name_of(static_cast<Operator>(index))) +
                                "' once, got it twice");
            given[index] = true;
            found[index] = read_entry(json, static_cast<Operator>(index), name);
        }
        at = section;
        for (size_t i = 0; i < given.size(); ++i)
            if (!given[i])
                throw FileError("Expected operator '" +
                                std::string(name_of(static_cast<Operator>(i))) + "', got none");
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (" + at + ")");
    }
    return found;
}

GRUShape read_sizes(const Json &info) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    GRUShape shape;
    shape.input_size = info.at("input_size").integer("input_size", 1, most);
    shape.hidden_size = info.at("hidden_size").integer("hidden_size", 1, most);
    if (const Json *bias = info.find("bias")) shape.bias = bias->boolean("bias");
    if (const Json *both = info.find("bidirectional"))
        shape.bidirectional = both->boolean("bidirectional");
    return shape;
}

ScaleKind kind_of(const std::vector<Entries> &cells, const Json *use_pot) {
    bool pot = true;
    for (const Entries &cell : cells)
        for (const Entry &entry : cell)
            pot = pot && std::all_of(entry.scales.begin(), entry.scales.end(), is_power_of_two);
    const std::optional<bool> given =
        use_pot && use_pot->is_boolean() ? std::optional(use_pot->boolean("")) : std::nullopt;
    if (given == true && !pot)
        throw FileError("Expected powers of two as scales (use_pot2_scale true), got others");
    return pot && given != false ? ScaleKind::pot : ScaleKind::free;
}

// How the version rounds that wrote a file: half away from zero with older names of operators.
Rounding rounding_of(const Json &operators) {
    for (const auto &[name, json] : operators.object("'operators'"))
        if (!from_newer_name(name).empty()) return Rounding::half_even;
    return Rounding::half_away;
}

CellParameters cell_of(const Entries &entries, ScaleKind kind, Rounding rounding,
                       const GRUShape &shape) {
    CellParameters cell;
    cell.config.rounding = rounding;
    cell.config.scale_kind = kind;
    cell.config.correct_bias = false;
    for (size_t i = 0; i < entries.size(); ++i) cell.config.operators[i] = entries[i].config;
    for (size_t i = 0; i < entries.size(); ++i) {
        const auto op = static_cast<Operator>(i);
        std::vector<double> scales = entries[i].scales;
        try {
            if (!is_weight(op)) {
                set_quantizer(cell, op, scales[0], entries[i].zero_point);
            } else if (shape.bias || op == Operator::W || op == Operator::R) {
                // from z, r, n to r, z, n
                const auto each = static_cast<std::ptrdiff_t>(scales.size() / 3);
                std::swap_ranges(scales.begin(), scales.begin() + each, scales.begin() + each);
                set_pinned(cell, op, std::move(scales), shape.hidden_size);
            }
        } catch (const FileError &error) {
            throw FileError(std::string(error.what()) + " (operator '" + entries[i].name + "')");
        }
    }
    build_tables(cell);
    return cell;
}

}  // namespace

bool is_of_quant_gru_pytorch(const Json &document) {
    if (!document.is_object() || document.find("format")) return false;
    const Json *info = document.find("model_info");
    return info && info->is_object() && document.find("operators");
}

Parameters read_quant_gru_pytorch(const Json &document, const std::string &where) {
    try {
        const Json &info = document.at("model_info");
        Parameters found;
        found.shape = read_sizes(info);
        std::vector<Entries> cells = {read_entries(document, "operators")};
        if (found.shape.bidirectional) cells.push_back(read_entries(document, "operators_reverse"));
        const ScaleKind kind = kind_of(cells, info.find("use_pot2_scale"));
        for (const Entries &entries : cells)
            found.cells.push_back(
                cell_of(entries, kind, rounding_of(document.at("operators")), found.shape));
        found.config = found.cells[0].config;
        return found;
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (" + where + ")");
    }
}

}  // namespace quant_gru
