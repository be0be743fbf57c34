// Whole files.
#pragma once

#include <string>
#include <string_view>

namespace quant_gru {

// Throws FileError if the file cannot be read.
std::string read_file(const std::string &path);

// Text without its byte order mark. Throws FileError if it is not UTF-8.
std::string_view checked_utf8(std::string_view text);

// Writes a file in one step: on failure the previous contents remain. Throws FileError.
void write_file(const std::string &path, const std::string &contents);

}  // namespace quant_gru
