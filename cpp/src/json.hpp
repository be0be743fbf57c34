// A strict reader of JSON (RFC 8259) for files of unknown origin.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace quant_gru {

// A value. Access to another kind, or to an absent key, throws FileError.
class Json {
 public:
    using Array = std::vector<Json>;
    using Object = std::vector<std::pair<std::string, Json>>;  // in the order of the text

    Json() = default;  // null
    explicit Json(Object members) : value_(std::move(members)) {}
    explicit Json(std::string text) : value_(std::move(text)) {}

    // Nesting is limited to 64 levels, and keys of an object are unique. Throws FileError; its
    // message starts with "Expected JSON" and ends with the offset in the text.
    static Json parse(std::string_view text);

    bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
    bool is_object() const { return std::holds_alternative<Object>(value_); }
    bool is_array() const { return std::holds_alternative<Array>(value_); }
    bool is_boolean() const { return std::holds_alternative<bool>(value_); }
    bool is_string() const { return std::holds_alternative<std::string>(value_); }
    // `what` names the value in messages.
    bool boolean(std::string_view what) const;
    int64_t integer(std::string_view what, int64_t least, int64_t most) const;
    double real(std::string_view what) const;
    const std::string &string(std::string_view what) const;
    const Array &array(std::string_view what) const;
    const Object &object(std::string_view what) const;
    // The member of an object.
    const Json &at(std::string_view key) const;
    const Json *find(std::string_view key) const;  // null if there is none

 private:
    friend class JsonParser;
    struct Number {
        double real;
        int64_t integer;
        bool is_integer;  // no fraction, no exponent, and it fits 64 bits
    };
    std::variant<std::monostate, bool, Number, std::string, Array, Object> value_;
};

}  // namespace quant_gru
