#include "files.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "quant_gru/model.hpp"

namespace quant_gru {

std::string read_file(const std::string &path) {
    std::ifstream stream(path, std::ios::binary);
    std::string found;
    if (stream) found.assign(std::istreambuf_iterator<char>(stream), {});
    if (!stream.good() && !stream.eof())
        throw FileError("Expected a readable file, got " + std::string(std::strerror(errno)) +
                        " (file '" + path + "')");
    return found;
}

void write_file(const std::string &path, const std::string &contents) {
    const std::string draft = path + "." + std::to_string(std::random_device{}()) + ".tmp";
    std::ofstream stream(draft, std::ios::binary | std::ios::trunc);
    stream.write(contents.data(), static_cast<std::streamsize>(contents.size()));
    stream.close();
    bool written = !stream.fail();
#if defined(_WIN32)
    if (written) std::remove(path.c_str());  // rename does not replace files
#endif
    written = written && std::rename(draft.c_str(), path.c_str()) == 0;
    if (written) return;
    const std::string reason = std::strerror(errno);
    std::remove(draft.c_str());
    throw FileError("Expected a writable file, got " + reason + " (file '" + path + "')");
}

}  // namespace quant_gru
