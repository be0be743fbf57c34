// Compiled kernels on disk: one file each, verified by a digest of its name and content.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace kernel_runtime::cuda {

// The name of an entry: a digest of everything that determines the compiled code.
std::string cache_key(const std::vector<std::string> &parts);

// A folder of compiled kernels. The digest of an entry has no secret. Whoever can write the folder
// decides what runs on the GPU, so a folder that other users can write is not used.
class CubinCache {
 public:
    // The folder is what the environment variable names, or `name` in XDG_CACHE_HOME or ~/.cache
    // (macOS: ~/Library/Caches, Windows: LOCALAPPDATA).
    // `warn` gets a message about a folder that is not trusted, once in a process.
    CubinCache(const std::string &variable, const std::string &name,
               std::function<void(const std::string &)> warn);

    // Empty if no variable is set and the user has no home.
    const std::string &folder() const { return folder_; }

    // The compiled kernel; empty if it is missing or damaged.
    std::string load(const std::string &key) const;

    // Writes a compiled kernel in one step. Returns why it was not written, or "".
    std::string store(const std::string &key, const std::string &code) const;

 private:
    std::string distrust() const;
    std::string path_of(const std::string &key) const { return folder_ + "/" + key + ".cubin"; }

    std::string variable_, folder_;
    std::function<void(const std::string &)> warn_;
};

}  // namespace kernel_runtime::cuda
