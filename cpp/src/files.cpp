#include "files.hpp"

#include <cerrno>
#include <cstring>

#include "kernel_runtime/native/whole_files.hpp"
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
    if (!kernel_runtime::read_whole(path, found))
        throw FileError("Expected a readable file, got " + std::string(std::strerror(errno)) +
                        " (file '" + path + "')");
    return found;
}

void write_file(const std::string &path, const std::string &contents) {
    if (!kernel_runtime::write_whole(path, contents, 0666))
        throw FileError("Expected a writable file, got " + std::string(std::strerror(errno)) +
                        " (file '" + path + "')");
}

}  // namespace quant_gru
