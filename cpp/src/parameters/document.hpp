// The parameter document, docs/parameter_file.md.
#pragma once

#include <string>

#include "json.hpp"
#include "json_writer.hpp"
#include "quant_gru/parameters.hpp"

namespace quant_gru {

// Throws FileError, which names `where`.
Parameters read_document(const Json &document, const std::string &where);

void write_document(const Parameters &parameters, JsonWriter &to);

// Writes the JSON of a packed document, and returns its columns: see
// src/quant_gru/parameters/packed.py.
std::string write_packed_document(const Parameters &parameters, JsonWriter &to);

}  // namespace quant_gru
