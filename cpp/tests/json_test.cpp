// The JSON reader: what RFC 8259 allows, and nothing else.
#include "json.hpp"

#include <string>

#include "check.hpp"
#include "quant_gru/model.hpp"

using quant_gru::FileError;
using quant_gru::Json;

namespace {

void test_values() {
    const Json json = Json::parse(
        " {\"a\": [1, -2, 0, 9223372036854775807, -9223372036854775808], \"b\": true,\n"
        "\t\"c\": null, \"d\": -1.5e-3, \"e\": \"x\\n\\u00e9\\ud83d\\ude00\\/\", \"f\": {}, \"g\": "
        "[]}\r");
    const Json::Array &a = json.at("a").array("a");
    CHECK(a.size() == 5);
    CHECK(a[3].integer("a", INT64_MIN, INT64_MAX) == INT64_MAX);
    CHECK(a[4].integer("a", INT64_MIN, INT64_MAX) == INT64_MIN);
    CHECK(json.at("b").boolean("b"));
    CHECK(json.at("c").is_null());
    CHECK(json.at("d").real("d") == -1.5e-3);
    CHECK(json.at("e").string("e") == "x\n\xc3\xa9\xf0\x9f\x98\x80/");
    CHECK(json.at("f").object("f").empty());
    CHECK(json.at("g").array("g").empty());
    CHECK(json.find("h") == nullptr);
    CHECK(Json::parse("9223372036854775808").real("n") == 9223372036854775808.);
}

void test_errors() {
    for (const char *text : {"",
                             " ",
                             "{",
                             "[",
                             "[1",
                             "[1,",
                             "[1,]",
                             "[1 2]",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{a:1}",
                             "{1:1}",
                             "01",
                             "-",
                             "-01",
                             "+1",
                             "1.",
                             ".5",
                             "1e",
                             "1e+",
                             "tru",
                             "nul",
                             "NaN",
                             "Infinity",
                             "\"",
                             "\"\\",
                             "\"\\x\"",
                             "\"\\u12\"",
                             "\"\\u12g4\"",
                             "\"\\ud800\"",
                             "\"\\ud800\\u0041\"",
                             "\"\\udc00\"",
                             "\"\n\"",
                             "1 1",
                             "{} {}",
                             "'a'",
                             "[1]]",
                             "1e999"})
        CHECK_THROWS(FileError, "Expected JSON with", Json::parse(text));
    CHECK_THROWS(FileError, "unique keys, got two of 'a'",
                 Json::parse("{\"a\":1,\"b\":2,\"a\":3}"));
    CHECK_THROWS(FileError, "at most 64 levels", Json::parse(std::string(100'000, '[')));
    CHECK_THROWS(FileError, "in [1, 5], got 6", Json::parse("6").integer("n", 1, 5));
    CHECK_THROWS(FileError, "got another number", Json::parse("1.0").integer("n", 1, 5));
    CHECK_THROWS(FileError, "Expected n to be an integer", Json::parse("true").integer("n", 1, 5));
    CHECK_THROWS(FileError, "Expected key 'b', got none", Json::parse("{\"a\":1}").at("b"));
    CHECK_THROWS(FileError, "around 'b' to be an object", Json::parse("[]").at("b"));
    CHECK_THROWS(FileError, "true or false", Json::parse("1").boolean("n"));
    CHECK_THROWS(FileError, "a number", Json::parse("\"1\"").real("n"));
    CHECK_THROWS(FileError, "a string", Json::parse("1").string("n"));
    CHECK_THROWS(FileError, "an array", Json::parse("{}").array("n"));
}

}  // namespace

int main() {
    test_values();
    test_errors();
    return failures != 0;
}
