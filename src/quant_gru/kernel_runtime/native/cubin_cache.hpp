// Compiled kernels on disk. The Python package has the same folder, names and contents, so both
// share what one of them compiled.
#pragma once

#include <string>
#include <vector>

namespace kernel_runtime::cuda {

// The name of an entry: a digest of everything that determines the compiled code.
std::string cache_key(const std::vector<std::string> &parts);

// What the environment names, or a folder in XDG_CACHE_HOME or ~/.cache (macOS: ~/Library/Caches,
// Windows: LOCALAPPDATA); empty if none of them is set.
std::string cache_folder();

// The compiled kernel; empty if it is missing or damaged.
std::string load_cubin(const std::string &key);

// Writes a compiled kernel in one step. Does nothing if the folder cannot be written, or if others
// can write it; the latter is said once on stderr.
void store_cubin(const std::string &key, const std::string &code);

}  // namespace kernel_runtime::cuda
