#include "json_writer.hpp"

#include <charconv>
#include <cstdio>
#include <cstdlib>

namespace quant_gru {
namespace {

void escape(unsigned unit, std::string &to) {
    char text[8];
    std::snprintf(text, sizeof text, "\\u%04x", unit & 0xFFFF);
    to += text;
}

// The code point at `i` of UTF-8; moves `i` to the next one.
unsigned next_code_point(const std::string &text, size_t &i) {
    const auto byte = [&text](size_t at) { return static_cast<unsigned char>(text[at]); };
    const unsigned first = byte(i++);
    const int more = first < 0xC0 ? 0 : first < 0xE0 ? 1 : first < 0xF0 ? 2 : 3;
    unsigned value = more == 0 ? first : first & (0x3Fu >> more);
    for (int k = 0; k < more && i < text.size(); ++k) value = value << 6 | (byte(i++) & 0x3Fu);
    return value;
}

}  // namespace

void JsonWriter::new_line() {
    if (indent_ < 0 || is_on_line()) return;
    text_ += '\n';
    text_.append(open_.size() * static_cast<size_t>(indent_), ' ');
}

void JsonWriter::before_value() {
    if (after_key_) {
        after_key_ = false;
        return;
    }
    if (open_.empty()) return;
    if (!empty_.back()) text_ += is_on_line() ? ", " : ",";
    empty_.back() = false;
    new_line();
}

JsonWriter &JsonWriter::begin(char bracket) {
    before_value();
    text_ += bracket;
    open_ += bracket == '{' ? '}' : ']';
    empty_.push_back(true);
    return *this;
}

JsonWriter &JsonWriter::end() {
    const char bracket = open_.back();
    const bool was_empty = empty_.back(), was_on_line = is_on_line();
    open_.pop_back();
    empty_.pop_back();
    if (!was_empty && !was_on_line) new_line();
    if (open_.size() == line_from_) line_from_ = std::string::npos;
    text_ += bracket;
    return *this;
}

JsonWriter &JsonWriter::key(const std::string &name) {
    before_value();
    text_ += quoted(name, ascii_) + (indent_ < 0 ? ":" : ": ");
    after_key_ = true;
    return *this;
}

JsonWriter &JsonWriter::raw(const std::string &text) {
    before_value();
    text_ += text;
    return *this;
}

JsonWriter &JsonWriter::null() { return raw("null"); }
JsonWriter &JsonWriter::value(bool flag) { return raw(flag ? "true" : "false"); }
JsonWriter &JsonWriter::value(int64_t number) { return raw(std::to_string(number)); }
JsonWriter &JsonWriter::value(double number) { return raw(shortest(number)); }
JsonWriter &JsonWriter::value(const std::string &text) { return raw(quoted(text, ascii_)); }

JsonWriter &JsonWriter::value(const std::vector<int64_t> &numbers) {
    begin('[');
    for (int64_t number : numbers) value(number);
    return end();
}

std::string shortest(double value) {
    char buffer[64];
    const auto end =
        std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
    std::string text(buffer, end.ptr), sign;
    if (text[0] == '-') {
        sign = "-";
        text.erase(0, 1);
    }
    const size_t e = text.find('e');
    const int exponent = std::atoi(text.c_str() + e + 1);
    std::string digits = text.substr(0, 1) + (e > 2 ? text.substr(2, e - 2) : "");
    if (exponent < -4 || exponent >= 16) {
        std::snprintf(buffer, sizeof buffer, "e%c%02d", exponent < 0 ? '-' : '+',
                      std::abs(exponent));
        return sign + digits.substr(0, 1) + (digits.size() > 1 ? "." + digits.substr(1) : "") +
               buffer;
    }
    if (exponent < 0)
        return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
    const size_t whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() < whole) digits.append(whole - digits.size(), '0');
    const std::string rest = digits.substr(whole);
    return sign + digits.substr(0, whole) + "." + (rest.empty() ? "0" : rest);
}

std::string quoted(const std::string &text, bool ascii) {
    static const std::string special = "\"\\\n\r\t\f\b", names = "\"\\nrtfb";
    std::string to = "\"";
    for (size_t i = 0; i < text.size();) {
        const size_t begin = i;
        const unsigned c = next_code_point(text, i);
        const size_t which = c < 0x80 ? special.find(static_cast<char>(c)) : std::string::npos;
        if (which != std::string::npos) {
            to += '\\';
            to += names[which];
        } else if (c >= 0x20 && (c < 0x80 || !ascii)) {
            to.append(text, begin, i - begin);
        } else if (c < 0x10000) {
            escape(c, to);
        } else {
            escape(0xD800 + ((c - 0x10000) >> 10), to);
            escape(0xDC00 + ((c - 0x10000) & 0x3FF), to);
        }
    }
    return to + '"';
}

}  // namespace quant_gru
