// The configuration as a part of other documents.
#pragma once

#include <string>

#include "json.hpp"
#include "json_writer.hpp"
#include "quant_gru/config.hpp"
#include "rounding_names.hpp"

namespace quant_gru {

extern const char *const kScaleKinds[2], *const kActivations[3], *const kGranularities[3];

// Reads {"GRU_config": ..}. Throws FileError, whose lines name every problem and `where`.
QuantConfig read_config(const Json &document, const std::string &where);

// Writes the complete configuration.
void write_config(const QuantConfig &config, JsonWriter &to);

// The same, with only the notes of the operators.
void write_rest_of_config(const QuantConfig &config, JsonWriter &to);

}  // namespace quant_gru
