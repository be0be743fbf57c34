#include "files.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>

#if !defined(_WIN32)
#include <fcntl.h>
#include <unistd.h>
#endif

#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// The bytes of the UTF-8 character at the start of the text; 0 if there is none. Overlong forms,
// surrogates and numbers beyond 0x10FFFF are no characters.
size_t character_size(std::string_view text) {
    const auto byte = [text](size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    const unsigned first = byte(0), second = byte(1);
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4) return 0;
    const size_t size = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    for (size_t i = 1; i < size; ++i)
        if ((byte(i) & 0xC0) != 0x80) return 0;
    const bool wrong = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                       (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
    return wrong ? 0 : size;
}

// Opens a file that does not exist yet; null on failure.
std::FILE *open_new(const std::string &path, unsigned mode) {
#if defined(_WIN32)
    (void)mode;
    return std::fopen(path.c_str(), "wbx");
#else
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, static_cast<mode_t>(mode));
    return file < 0 ? nullptr : fdopen(file, "wb");
#endif
}

}  // namespace

std::string_view checked_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        const size_t size = character_size(text.substr(i));
        if (!size) throw FileError("Expected UTF-8 text, got another byte at " + std::to_string(i));
        i += size;
    }
    return text.substr(0, 3) == "\xEF\xBB\xBF" ? text.substr(3) : text;
}

std::string read_file(const std::string &path) {
    std::string found;
    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen(path.c_str(), "rb"),
                                                                &std::fclose);
    char part[1 << 14];
    while (file && !std::feof(file.get()) && !std::ferror(file.get()))
        found.append(part, std::fread(part, 1, sizeof part, file.get()));
    if (!file || std::ferror(file.get()))
        throw FileError("Expected a readable file, got " + std::string(std::strerror(errno)) +
                        " (file '" + path + "')");
    return found;
}

void write_file(const std::string &path, const std::string &contents, unsigned mode) {
    const std::string draft = path + "." + std::to_string(std::random_device{}()) + ".tmp";
    std::FILE *const file = open_new(draft, mode);
    bool written =
        file && std::fwrite(contents.data(), 1, contents.size(), file) == contents.size();
    if (file) written = std::fclose(file) == 0 && written;
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
