#include "config/config_json.hpp"
#include "files.hpp"

namespace quant_gru {
namespace {

void write_notes(const Notes &notes, JsonWriter &to) {
    if (notes.description) to.member("description", *notes.description);
    if (notes.comment) to.member("comment", *notes.comment);
}

// Writes a number; null in place of 0.
void write_or_null(const char *key, int number, JsonWriter &to) {
    to.key(key);
    if (number)
        to.value(number);
    else
        to.null();
}

void write_operator(Operator op, const OperatorConfig &config, JsonWriter &to) {
    to.begin('{');
    write_or_null("bitwidth", config.bitwidth, to);
    to.member("is_symmetric", config.is_symmetric).member("is_unsigned", config.is_unsigned);
    if (is_weight(op))
        to.member("granularity", kGranularities[static_cast<int>(config.granularity)]);
    write_notes(config.notes, to);
    to.end();
}

enum class Operators { on_lines, on_one_line, only_notes };

void write(const QuantConfig &config, Operators operators, JsonWriter &to) {
    to.begin('{');
    write_notes(config.notes, to);
    to.key("GRU_config").begin('{');
    write_notes(config.gru_notes, to);
    to.key("default_config").begin('{');
    write_notes(config.default_notes, to);
    to.member("scale_kind", kScaleKinds[static_cast<int>(config.scale_kind)]);
    to.member("activation", kActivations[static_cast<int>(config.activation)]);
    write_or_null("segments", config.segments, to);
    to.member("correct_bias", config.correct_bias);
    to.member("input_excludes_zero", config.input_excludes_zero);
    to.member("tie_x_and_h", config.tie_x_and_h);
    to.member("rounding", kRoundings[static_cast<int>(config.rounding)]);
    to.key("rounding_input");
    if (config.rounding_input)
        to.value(kRoundings[static_cast<int>(*config.rounding_input)]);
    else
        to.null();
    to.member("disable_quantization", config.disable_quantization).end();
    to.key("operator_config").begin('{');
    write_notes(config.operator_notes, to);
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        const Notes &notes = config[op].notes;
        if (operators == Operators::only_notes) {
            if (!notes.description && !notes.comment) continue;
            to.key(name_of(op)).begin('{');
            write_notes(notes, to);
            to.end();
            continue;
        }
        to.key(name_of(op));
        if (operators == Operators::on_one_line) to.on_one_line();
        write_operator(op, config[op], to);
    }
    to.end().end().end();
}

}  // namespace

void write_config(const QuantConfig &config, JsonWriter &to) {
    write(config, Operators::on_lines, to);
}

void write_rest_of_config(const QuantConfig &config, JsonWriter &to) {
    write(config, Operators::only_notes, to);
}

std::string QuantConfig::to_text() const {
    JsonWriter to(2, false);
    write(*this, Operators::on_one_line, to);
    return to.text() + "\n";
}

void QuantConfig::to_json(const std::string &path) const { write_file(path, to_text()); }

}  // namespace quant_gru
