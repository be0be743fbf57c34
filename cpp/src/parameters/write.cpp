#include <algorithm>
#include <cmath>
#include <cstring>

#include "columns.hpp"
#include "config/config_json.hpp"
#include "files.hpp"
#include "parameters/document.hpp"

namespace quant_gru {
namespace {

void write_operator(const CellParameters &cell, Operator op, JsonWriter &to) {
    const OperatorConfig &config = cell.config[op];
    const bool has_quantizer = !is_weight(op) && config.bitwidth;
    to.key(name_of(op)).begin('{').key("bitwidth");
    if (config.bitwidth)
        to.value(config.bitwidth);
    else
        to.null();
    to.member("is_symmetric", config.is_symmetric).member("is_unsigned", config.is_unsigned);
    to.key("scale");
    if (has_quantizer) {
        const ActivationQuantizer &q = cell.quantizer(op);
        int exponent = 0;
        const bool is_power = std::frexp(q.scale, &exponent) == 0.5;
        to.value(q.scale).member("zero_point", q.zero_point).key("exp2_inv");
        if (is_power)
            to.value(1 - exponent);
        else
            to.null();
    } else {
        const auto index = static_cast<size_t>(op) - static_cast<size_t>(Operator::W);
        if (is_weight(op) && !cell.pinned[index].empty()) {
            to.begin('[');
            for (double scale : cell.pinned[index]) to.value(scale);
            to.end();
        } else {
            to.null();
        }
        to.key("zero_point").null().key("exp2_inv").null();
    }
    to.key("granularity");
    if (is_weight(op))
        to.value(kGranularities[static_cast<int>(config.granularity)]);
    else
        to.null();
    to.end();
}

void write_table(const ActivationTable &table, JsonWriter &to) {
    to.begin('{').member("bounds", table.bounds).member("last", table.last);
    to.key("coefficients").begin('[');
    const auto width = table.degree + 1;
    for (auto row = table.coefficients.begin(); row != table.coefficients.end(); row += width)
        to.value(std::vector<int64_t>(row, row + width));
    to.end().member("shift", table.shift).member("zero_point", table.zero_point);
    to.member("lo", table.lo).member("hi", table.hi).key("segment_shift");
    if (table.segment_shift < 0)
        to.null();
    else
        to.value(table.segment_shift);
    to.end();
}

// A mean as integers times the largest power of two that is possible.
struct Mean {
    int exp2_inv = 0;
    std::vector<int64_t> values;

    explicit Mean(const std::vector<double> &mean) {
        bool any = false;
        for (double value : mean) {
            if (value == 0) continue;
            int exponent = 0;
            auto whole = static_cast<int64_t>(std::ldexp(std::frexp(value, &exponent), 53));
            int digits = 53 - exponent;
            for (; whole % 2 == 0; whole /= 2) --digits;
            exp2_inv = any ? std::max(exp2_inv, digits) : digits;
            any = true;
        }
        for (double value : mean)
            values.push_back(static_cast<int64_t>(std::ldexp(value, exp2_inv)));
    }
};

void write_mean(const std::vector<double> &given, JsonWriter &to) {
    if (given.empty()) {
        to.null();
        return;
    }
    const Mean mean(given);
    to.begin('{').member("exp2_inv", mean.exp2_inv).member("values", mean.values).end();
}

void write_shape(const GRUShape &shape, JsonWriter &to) {
    to.key("gru").begin('{').member("input_size", shape.input_size);
    to.member("hidden_size", shape.hidden_size).member("num_layers", shape.num_layers);
    to.member("bias", shape.bias).member("bidirectional", shape.bidirectional);
    to.member("zoneout", shape.zoneout).end();
}

void write_operators(const QuantConfig &config, JsonWriter &to) {
    to.begin('{').key("bitwidth").begin('[');
    std::string symmetric, is_unsigned;
    for (int i = 0; i < kOperators; ++i) {
        const OperatorConfig &each = config[static_cast<Operator>(i)];
        if (each.bitwidth)
            to.value(each.bitwidth);
        else
            to.null();
        symmetric += each.is_symmetric ? '1' : '0';
        is_unsigned += each.is_unsigned ? '1' : '0';
    }
    to.end().member("is_symmetric", symmetric).member("is_unsigned", is_unsigned);
    to.key("granularity").begin('[');
    for (Operator op : {Operator::W, Operator::R, Operator::bw, Operator::br})
        to.value(kGranularities[static_cast<int>(config[op].granularity)]);
    to.end().end();
}

bool are_equal(const QuantConfig &a, const QuantConfig &b) {
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        if (a[op].bitwidth != b[op].bitwidth || a[op].is_symmetric != b[op].is_symmetric ||
            a[op].is_unsigned != b[op].is_unsigned ||
            (is_weight(op) && a[op].granularity != b[op].granularity))
            return false;
    }
    return true;
}

std::string columns_of(const ActivationTable &table) {
    const std::vector<int64_t> &bounds = table.bounds, &c = table.coefficients;
    const auto width = static_cast<size_t>(table.degree + 1);
    std::string to;
    add_column({static_cast<int64_t>(bounds.size()), table.degree, bounds[0], table.last,
                table.shift, table.zero_point, table.lo, table.hi, table.segment_shift},
               to);
    std::vector<int64_t> lengths;
    for (size_t i = 1; i < bounds.size(); ++i) lengths.push_back(bounds[i] - bounds[i - 1]);
    if (table.segment_shift < 0) add_column(lengths, to);
    add_column({c.begin(), c.begin() + table.degree + 1}, to);
    for (size_t p = 0; p < width; ++p) {
        std::vector<int64_t> changes;
        for (size_t i = 0; i < lengths.size(); ++i) {
            // modulo 2^64
            uint64_t before[3] = {};
            for (size_t j = 0; j < width; ++j) before[j] = static_cast<uint64_t>(c[i * width + j]);
            const auto L = static_cast<uint64_t>(lengths[i]);
            const uint64_t moved[3] = {before[0] + before[1] * L + before[2] * L * L,
                                       before[1] + 2 * before[2] * L, before[2]};
            const auto next = static_cast<uint64_t>(c[(i + 1) * width + p]);
            changes.push_back(static_cast<int64_t>(next - moved[p]));
        }
        add_column(changes, to);
    }
    return to;
}

void add_scales(const CellParameters &cell, std::string &columns) {
    std::vector<int64_t> scales, points;
    const auto add = [&scales](double scale) {
        const auto real = static_cast<float>(scale);
        int32_t bits;
        std::memcpy(&bits, &real, sizeof bits);
        scales.push_back(bits);
    };
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        if (is_weight(op) || !cell.config[op].bitwidth) continue;
        add(cell.quantizer(op).scale);
        points.push_back(cell.quantizer(op).zero_point);
    }
    for (const std::vector<double> &each : cell.pinned)
        for (double scale : each) add(scale);
    add_column(scales, columns);
    add_column(points, columns);
}

}  // namespace

void write_document(const Parameters &parameters, JsonWriter &to) {
    const GRUShape &shape = parameters.shape;
    to.begin('{').member("format", "quant-gru-params").member("version", 2);
    write_shape(shape, to);
    to.key("config");
    write_config(parameters.config, to);
    to.key("cells").begin('[');
    const auto D = static_cast<size_t>(shape.directions());
    for (size_t i = 0; i < parameters.cells.size(); ++i) {
        const CellParameters &cell = parameters.cells[i];
        to.begin('{').member("layer", static_cast<int64_t>(i / D)).member("reverse", i % D == 1);
        to.key("operators").begin('{');
        for (int op = 0; op < kOperators; ++op) write_operator(cell, static_cast<Operator>(op), to);
        to.end().key("tables").begin('{');
        for (Operator op : {Operator::z_out, Operator::r_out, Operator::g_out})
            write_table(cell.table(op), to.key(name_of(op)));
        write_mean(cell.input_mean, to.end().key("input_mean"));
        to.end();
    }
    to.end().end();
}

std::string write_packed_document(const Parameters &parameters, JsonWriter &to) {
    to.begin('{').member("format", "quant-gru-params").member("version", 2);
    write_shape(parameters.shape, to);
    write_rest_of_config(parameters.config, to.key("config"));
    std::vector<std::string> tables;
    std::string columns;
    to.key("cells").begin('[');
    for (const CellParameters &cell : parameters.cells) {
        to.begin('{').key("tables").begin('[');
        for (Operator op : {Operator::z_out, Operator::r_out, Operator::g_out}) {
            const std::string table = columns_of(cell.table(op));
            const auto found = std::find(tables.begin(), tables.end(), table);
            to.value(static_cast<int64_t>(found - tables.begin()));
            if (found == tables.end()) tables.push_back(table);
        }
        to.end();
        add_scales(cell, columns);
        if (!cell.input_mean.empty()) {
            const Mean mean(cell.input_mean);
            to.member("exp2_inv", mean.exp2_inv);
            add_column(mean.values, columns);
        }
        std::vector<int64_t> counts;
        for (const auto &each : cell.pinned) counts.push_back(static_cast<int64_t>(each.size()));
        if (std::any_of(counts.begin(), counts.end(), [](int64_t n) { return n > 0; }))
            to.member("pinned", counts);
        if (!are_equal(cell.config, parameters.config))
            write_operators(cell.config, to.key("operators"));
        to.end();
    }
    write_operators(parameters.config, to.end().key("operators"));
    to.end();
    std::string all;
    for (const std::string &table : tables) all += table;
    return all + columns;
}

std::string Parameters::to_text() const {
    JsonWriter to(1, false);
    write_document(*this, to);
    return to.text() + "\n";
}

void Parameters::save(const std::string &path) const { write_file(path, to_text()); }

}  // namespace quant_gru
