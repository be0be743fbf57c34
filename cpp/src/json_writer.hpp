// Writes JSON as json.dumps of Python does.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace quant_gru {

class JsonWriter {
 public:
    // indent: spaces per level, with one value per line; negative for text without spaces.
    // ascii: whether to escape all other characters.
    explicit JsonWriter(int indent, bool ascii) : indent_(indent), ascii_(ascii) {}

    JsonWriter &begin(char bracket);  // '{' or '['
    // From here to the end of the value that is begun next, values stay on one line.
    JsonWriter &on_one_line() {
        line_from_ = open_.size();
        return *this;
    }
    JsonWriter &end();
    JsonWriter &key(const std::string &name);

    JsonWriter &null();
    JsonWriter &value(bool flag);
    JsonWriter &value(int number) { return value(static_cast<int64_t>(number)); }
    JsonWriter &value(int64_t number);
    JsonWriter &value(double number);
    JsonWriter &value(const std::string &text);
    JsonWriter &value(const char *text) { return value(std::string(text)); }
    JsonWriter &value(const std::vector<int64_t> &numbers);
    template <class T>
    JsonWriter &value(const std::optional<T> &maybe) {
        return maybe ? value(*maybe) : null();
    }
    template <class T>
    JsonWriter &member(const std::string &name, const T &what) {
        return key(name).value(what);
    }

    const std::string &text() const { return text_; }

 private:
    void before_value();
    JsonWriter &raw(const std::string &text);  // a value
    void new_line();
    bool is_on_line() const { return open_.size() > line_from_; }

    int indent_;
    bool ascii_, after_key_ = false;
    std::string text_, open_;  // open_: the closing brackets, outermost first
    std::vector<bool> empty_;
    size_t line_from_ = std::string::npos;
};

// The shortest decimal number that reads as `value`, as repr of Python writes it.
std::string shortest(double value);

// Text in quotation marks, with escapes. The text is UTF-8.
std::string quoted(const std::string &text, bool ascii);

}  // namespace quant_gru
