#include "config/config_json.hpp"
#include "files.hpp"

namespace quant_gru {
namespace {

void write_notes(const Notes &notes, JsonWriter &to) {
    if (notes.description) to.member("description", *notes.description);
    if (notes.comment) to.member("comment", *notes.comment);
}

void write_width(const OperatorConfig &config, JsonWriter &to) {
    to.key("bitwidth");
    if (config.bitwidth)
        to.value(config.bitwidth);
    else
        to.null();
}

// Writes one operator on one line, with a space after each comma and colon.
std::string line_of(Operator op, const OperatorConfig &config) {
    const auto flag = [](bool value) { return value ? "true" : "false"; };
    std::string line = "{\"bitwidth\": ";
    line += config.bitwidth ? std::to_string(config.bitwidth) : "null";
    line += std::string(", \"is_symmetric\": ") + flag(config.is_symmetric) +
            ", \"is_unsigned\": " + flag(config.is_unsigned);
    if (is_weight(op))
        line += ", \"granularity\": " +
                quoted(kGranularities[static_cast<int>(config.granularity)], false);
    if (config.notes.description)
        line += ", \"description\": " + quoted(*config.notes.description, false);
    if (config.notes.comment) line += ", \"comment\": " + quoted(*config.notes.comment, false);
    return line + "}";
}

template <class WriteOperator>
void write(const QuantConfig &config, JsonWriter &to, WriteOperator write_operator) {
    to.begin('{');
    write_notes(config.notes, to);
    to.key("GRU_config").begin('{');
    write_notes(config.gru_notes, to);
    to.key("default_config").begin('{');
    write_notes(config.default_notes, to);
    to.member("scale_kind", kScaleKinds[static_cast<int>(config.scale_kind)]);
    to.member("activation", kActivations[static_cast<int>(config.activation)]);
    to.key("segments");
    if (config.segments)
        to.value(config.segments);
    else
        to.null();
    to.member("disable_quantization", config.disable_quantization).end();
    to.key("operator_config").begin('{');
    write_notes(config.operator_notes, to);
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        to.key(name_of(op));
        write_operator(op, config[op]);
    }
    to.end().end().end();
}

}  // namespace

void write_config(const QuantConfig &config, JsonWriter &to) {
    write(config, to, [&to](Operator op, const OperatorConfig &operator_config) {
        to.begin('{');
        write_width(operator_config, to);
        to.member("is_symmetric", operator_config.is_symmetric);
        to.member("is_unsigned", operator_config.is_unsigned);
        if (is_weight(op))
            to.member("granularity", kGranularities[static_cast<int>(operator_config.granularity)]);
        write_notes(operator_config.notes, to);
        to.end();
    });
}

std::string QuantConfig::to_text() const {
    JsonWriter to(2, false);
    write(*this, to,
          [&to](Operator op, const OperatorConfig &config) { to.raw(line_of(op, config)); });
    return to.text() + "\n";
}

void QuantConfig::to_json(const std::string &path) const { write_file(path, to_text()); }

}  // namespace quant_gru
