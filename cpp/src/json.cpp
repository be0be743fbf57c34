#include "json.hpp"

#include <algorithm>
#include <charconv>
#include <system_error>
#if !defined(__cpp_lib_to_chars)
#include <locale>
#include <sstream>
#endif

#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int kDepth = 64;

[[noreturn]] void expected(std::string_view what, const std::string &rule) {
    throw FileError("Expected " + std::string(what) + " to be " + rule);
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(std::string &to, uint32_t c) {
    auto put = [&](uint32_t byte) { to.push_back(static_cast<char>(byte)); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xc0 | c >> 6);
        put(0x80 | (c & 0x3f));
    } else if (c < 0x10000) {
        put(0xe0 | c >> 12);
        put(0x80 | (c >> 6 & 0x3f));
        put(0x80 | (c & 0x3f));
    } else {
        put(0xf0 | c >> 18);
        put(0x80 | (c >> 12 & 0x3f));
        put(0x80 | (c >> 6 & 0x3f));
        put(0x80 | (c & 0x3f));
    }
}

}  // namespace

class JsonParser {
 public:
    explicit JsonParser(std::string_view text) : text_(text) {}

    Json document() {
        Json found = value(0);
        skip_space();
        if (at_ != text_.size()) fail("nothing after the value");
        return found;
    }

 private:
    [[noreturn]] void fail(const std::string &rule) const {
        throw FileError("Expected JSON with " + rule + " at byte " + std::to_string(at_));
    }

    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

    void skip_space() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' ||
                                      text_[at_] == '\r' || text_[at_] == '\t'))
            ++at_;
    }

    bool accept(char c) {
        skip_space();
        if (peek() != c || at_ == text_.size()) return false;
        ++at_;
        return true;
    }

    void require(char c) {
        if (!accept(c)) fail(std::string("'") + c + "'");
    }

    bool word(std::string_view name) {
        if (text_.substr(at_, name.size()) != name) return false;
        at_ += name.size();
        return true;
    }

    Json value(int depth) {
        if (depth > kDepth) fail("at most " + std::to_string(kDepth) + " levels");
        skip_space();
        Json found;
        switch (peek()) {
            case '{':
                found.value_ = object(depth);
                break;
            case '[':
                found.value_ = array(depth);
                break;
            case '"':
                found.value_ = string();
                break;
            default:
                if (word("true"))
                    found.value_ = true;
                else if (word("false"))
                    found.value_ = false;
                else if (!word("null"))
                    found.value_ = number();
        }
        return found;
    }

    Json::Object object(int depth) {
        Json::Object found;
        require('{');
        if (accept('}')) return found;
        do {
            skip_space();
            std::string key = string();
            require(':');
            found.emplace_back(std::move(key), value(depth + 1));
        } while (accept(','));
        require('}');
        std::vector<std::string_view> keys;
        for (const auto &member : found) keys.emplace_back(member.first);
        std::sort(keys.begin(), keys.end());
        const auto twice = std::adjacent_find(keys.begin(), keys.end());
        if (twice != keys.end()) fail("unique keys, got two of '" + std::string(*twice) + "'");
        return found;
    }

    Json::Array array(int depth) {
        Json::Array found;
        require('[');
        if (accept(']')) return found;
        do found.push_back(value(depth + 1));
        while (accept(','));
        require(']');
        found.shrink_to_fit();
        return found;
    }

    std::string string() {
        if (peek() != '"') fail("a string");
        ++at_;
        std::string found;
        for (;;) {
            if (at_ >= text_.size()) fail("the end of a string");
            const char c = text_[at_++];
            if (c == '"') return found;
            if (static_cast<unsigned char>(c) < 0x20) fail("no control character in a string");
            if (c == '\\')
                escape(found);
            else
                found.push_back(c);
        }
    }

    void escape(std::string &to) {
        constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
        const char c = peek();
        const size_t index = kLetters.find(c);
        if (c != 'u' && (at_ >= text_.size() || index == kLetters.npos)) fail("a known escape");
        ++at_;
        if (c != 'u') {
            to.push_back(kMeanings[index]);
            return;
        }
        uint32_t code = four_digits();
        if (code >= 0xd800 && code < 0xdc00) {
            const uint32_t low = word("\\u") ? four_digits() : 0;
            if (low < 0xdc00 || low > 0xdfff) fail("a pair of surrogates");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else if (code >= 0xdc00 && code < 0xe000) {
            fail("a pair of surrogates");
        }
        append_utf8(to, code);
    }

    uint32_t four_digits() {
        uint32_t code = 0;
        for (int i = 0; i < 4; ++i, ++at_) {
            const char c = peek();
            const int digit = is_digit(c)            ? c - '0'
                              : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                     : -1;
            if (digit < 0) fail("four hexadecimal digits");
            code = code << 4 | static_cast<uint32_t>(digit);
        }
        return code;
    }

    void digits() {
        if (!is_digit(peek())) fail("a value");
        while (is_digit(peek())) ++at_;
    }

    Json::Number number() {
        const size_t start = at_;
        if (peek() == '-') ++at_;
        if (peek() == '0')
            ++at_;
        else
            digits();
        bool whole = true;
        if (peek() == '.') {
            whole = false;
            ++at_;
            digits();
        }
        if (peek() == 'e' || peek() == 'E') {
            whole = false;
            ++at_;
            if (peek() == '+' || peek() == '-') ++at_;
            digits();
        }
        const std::string_view text = text_.substr(start, at_ - start);
        Json::Number found{0, 0, false};
        if (whole && integer(text, found.integer)) {
            found.is_integer = true;
            found.real = static_cast<double>(found.integer);
            return found;
        }
        if (!real(text, found.real)) fail("numbers that fit 64 bits");
        return found;
    }

    // Whether a number fits 64 bits; one below the smallest becomes 0.
    static bool real(std::string_view text, double &found) {
#if defined(__cpp_lib_to_chars)
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
        if (error != std::errc::result_out_of_range) return true;
        found = 0;
        return text.find("e-") != text.npos || text.find("E-") != text.npos;
#else
        std::istringstream stream{std::string(text)};
        stream.imbue(std::locale::classic());
        return bool(stream >> found);
#endif
    }

    // Whether an integer fits 64 bits.
    static bool integer(std::string_view text, int64_t &found) {
        const bool negative = text[0] == '-';
        found = 0;
        for (char c : text.substr(negative)) {
            const int digit = negative ? '0' - c : c - '0';
            if (__builtin_mul_overflow(found, int64_t{10}, &found) ||
                __builtin_add_overflow(found, int64_t{digit}, &found))
                return false;
        }
        return true;
    }

    std::string_view text_;
    size_t at_ = 0;
};

Json Json::parse(std::string_view text) { return JsonParser(text).document(); }

bool Json::boolean(std::string_view what) const {
    if (const bool *found = std::get_if<bool>(&value_)) return *found;
    expected(what, "true or false");
}

int64_t Json::integer(std::string_view what, int64_t least, int64_t most) const {
    const Number *found = std::get_if<Number>(&value_);
    if (found && found->is_integer && found->integer >= least && found->integer <= most)
        return found->integer;
    const std::string got = found && found->is_integer ? std::to_string(found->integer)
                            : found                    ? "another number"
                                                       : "another kind of value";
    expected(what, "an integer in [" + std::to_string(least) + ", " + std::to_string(most) +
                       "], got " + got);
}

double Json::real(std::string_view what) const {
    if (const Number *found = std::get_if<Number>(&value_)) return found->real;
    expected(what, "a number");
}

const std::string &Json::string(std::string_view what) const {
    if (const auto *found = std::get_if<std::string>(&value_)) return *found;
    expected(what, "a string");
}

const Json::Array &Json::array(std::string_view what) const {
    if (const auto *found = std::get_if<Array>(&value_)) return *found;
    expected(what, "an array");
}

const Json::Object &Json::object(std::string_view what) const {
    if (const auto *found = std::get_if<Object>(&value_)) return *found;
    expected(what, "an object");
}

const Json *Json::find(std::string_view key) const {
    for (const auto &member : object("the value around '" + std::string(key) + "'"))
        if (member.first == key) return &member.second;
    return nullptr;
}

const Json &Json::at(std::string_view key) const {
    const Json *found = find(key);
    if (!found) throw FileError("Expected key '" + std::string(key) + "', got none");
    return *found;
}

}  // namespace quant_gru
