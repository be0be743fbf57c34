// Whole files.
#pragma once

#include <string>

namespace quant_gru {

// Throws FileError if the file cannot be read.
std::string read_file(const std::string &path);

// Writes a file in one step: on failure the previous contents remain. Throws FileError.
void write_file(const std::string &path, const std::string &contents);

}  // namespace quant_gru
