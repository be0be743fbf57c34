// Whole files, without exceptions: errno says why a function failed.
#pragma once

#include <string>

namespace kernel_runtime {

// Appends the contents of a file.
bool read_whole(const std::string &path, std::string &to);

// Writes a file in one step: on failure the previous contents remain. `mode` are the permissions
// of a new file, of which the umask takes some.
bool write_whole(const std::string &path, const std::string &contents, unsigned mode);

}  // namespace kernel_runtime
