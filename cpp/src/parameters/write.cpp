#include <algorithm>
#include <cmath>

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

// Writes means as integers times the largest power of two that is possible.
void write_mean(const std::vector<double> &mean, JsonWriter &to) {
    if (mean.empty()) {
        to.null();
        return;
    }
    int exp2_inv = 0;
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
    std::vector<int64_t> values;
    for (double value : mean) values.push_back(static_cast<int64_t>(std::ldexp(value, exp2_inv)));
    to.begin('{').member("exp2_inv", exp2_inv).member("values", values).end();
}

}  // namespace

void write_document(const Parameters &parameters, JsonWriter &to) {
    const GRUShape &shape = parameters.shape;
    to.begin('{').member("format", "quant-gru-params").member("version", 2);
    to.key("gru").begin('{').member("input_size", shape.input_size);
    to.member("hidden_size", shape.hidden_size).member("num_layers", shape.num_layers);
    to.member("bias", shape.bias).member("bidirectional", shape.bidirectional);
    to.member("zoneout", shape.zoneout).end();
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

std::string Parameters::to_text() const {
    JsonWriter to(1, false);
    write_document(*this, to);
    return to.text() + "\n";
}

void Parameters::save(const std::string &path) const { write_file(path, to_text()); }

}  // namespace quant_gru
