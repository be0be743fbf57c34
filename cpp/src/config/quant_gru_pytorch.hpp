// Names of quant-gru-pytorch, in its configurations and parameter files.
#pragma once

#include <string>

#include "json.hpp"

namespace quant_gru {

// The full name of an operator from a newer name, with or without its group; empty for others.
std::string from_newer_name(const std::string &name);

// A configuration with the names and fields of this library. Anything that is not of the public
// project stays as it is, for the reader to check. Throws FileError if an operator or setting is
// named twice, or a value has no meaning.
Json translated(const Json &document);

}  // namespace quant_gru
