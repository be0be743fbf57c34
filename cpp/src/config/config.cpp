#include "quant_gru/config.hpp"

#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

const char *const kNames[kOperators] = {
    "input.x",    "output.h",   "weight.W",   "weight.R",       "weight.bw",     "weight.br",
    "matmul.Wx",  "matmul.Rh",  "gate.z_pre", "gate.z_out",     "gate.r_pre",    "gate.r_out",
    "gate.g_pre", "gate.g_out", "op.rRh",     "op.old_contrib", "op.new_contrib"};

}  // namespace

const char *name_of(Operator op) { return kNames[static_cast<int>(op)]; }

Operator operator_of(const std::string &name) {
    const auto is = [&name](const std::string &full) {
        return name == full || name == full.substr(full.find('.') + 1);
    };
    for (int i = 0; i < kOperators; ++i)
        if (is(kNames[i])) return static_cast<Operator>(i);
    if (name == "input.h") return Operator::h;
    if (is("weight.bx")) return Operator::bw;
    throw ArgumentError("Expected a known operator, got '" + name + "'");
}

QuantConfig::QuantConfig() {
    (*this)[Operator::z_out].is_unsigned = true;
    (*this)[Operator::r_out].is_unsigned = true;
}

QuantConfig QuantConfig::uniform(int bitwidth, bool is_symmetric) {
    if (bitwidth < 1 || bitwidth > 32)
        throw ArgumentError("Expected bitwidth to be an integer from 1 to 32, got " +
                            std::to_string(bitwidth));
    QuantConfig config;
    for (int i = 0; i < kOperators; ++i) {
        const auto op = static_cast<Operator>(i);
        config[op].bitwidth = bitwidth;
        config[op].is_symmetric = is_symmetric || is_weight(op);
    }
    return config;
}

QuantConfig QuantConfig::w8a16() {
    QuantConfig config = int16();
    config[Operator::W].bitwidth = config[Operator::R].bitwidth = 8;
    return config;
}

QuantConfig QuantConfig::int8_wide() {
    QuantConfig config = int8();
    config[Operator::Wx].bitwidth = config[Operator::Rh].bitwidth = 14;
    config[Operator::z_pre].bitwidth = config[Operator::g_pre].bitwidth = 12;
    config[Operator::z_out].bitwidth = config[Operator::g_out].bitwidth = 10;
    for (Operator op : {Operator::rRh, Operator::old_contrib, Operator::new_contrib})
        config[op].bitwidth = 0;
    return config;
}

}  // namespace quant_gru
