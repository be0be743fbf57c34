// The reader of files, which come from untrusted places: wrong files are errors, whatever they
// contain.
//
//     reader_test GOLDEN [MUTATIONS]
//
// Each model of the golden file is changed in random places, MUTATIONS times. It then loads and
// runs, or it is a FileError. With sanitizers, reads out of bounds and overflows fail, too.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "golden.hpp"
#include "quant_gru/model.hpp"
#include "safetensors.hpp"

using quant_gru::FileError;
using quant_gru::Model;

namespace {

using Bytes = std::vector<char>;

Bytes with_header(const std::string &header, size_t data) {
    const uint64_t size = header.size();
    Bytes file(8 + header.size() + data, '\1');
    std::memcpy(file.data(), &size, 8);
    std::copy(header.begin(), header.end(), file.begin() + 8);
    return file;
}

std::string header_of(const Bytes &file) {
    uint64_t size;
    std::memcpy(&size, file.data(), 8);
    return std::string(file.data() + 8, size);
}

// The file with a part of its header replaced.
Bytes replaced(const Bytes &file, const std::string &from, const std::string &to) {
    std::string header = header_of(file);
    const size_t at = header.find(from);
    CHECK(at != header.npos);
    if (at == header.npos) return file;
    const size_t end = 8 + header.size();
    header.replace(at, from.size(), to);
    Bytes found = with_header(header, 0);
    found.insert(found.end(), file.begin() + static_cast<std::ptrdiff_t>(end), file.end());
    return found;
}

Model load(const Bytes &file) { return Model::load(file.data(), file.size()); }

void test_safetensors() {
    auto read = [](const std::string &header, size_t data) {
        const Bytes file = with_header(header, data);
        return quant_gru::read_safetensors(file.data(), file.size()).tensors.size();
    };
    const std::string a = "\"a\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[0,4]}";
    const std::string b = "\"b\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[4,5]}";
    CHECK(read("{" + b + "," + a + "}  ", 5) == 2);
    CHECK(read("{}", 0) == 0);
    for (const auto &[header, data, part] : {
             std::tuple{"{" + a + "}", 5, "Expected 4 bytes of data, got 5"},
             std::tuple{"{" + b + "}", 5, "'b' to begin at byte 0 of the data, got 4"},
             std::tuple{"{" + a + "}", 3, "in [0, 3], got 4"},
             std::tuple{"{" + a + "," + a + "}", 4, "unique keys"},
             std::tuple{std::string("[]"), 0, "the header to be an object"},
             std::tuple{std::string("{\"__metadata__\":{\"k\":1}}"), 0, "k to be a string"},
             std::tuple{
                 std::string("{\"a\":{\"dtype\":\"F8\",\"shape\":[],\"data_offsets\":[0,1]}}"), 1,
                 "to be I8, U8, I16"},
             std::tuple{std::string("{\"a\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0]}}"),
                        1, "Expected two data_offsets"},
             std::tuple{
                 std::string("{\"a\":{\"dtype\":\"I8\",\"shape\":[2],\"data_offsets\":[0,1]}}"), 1,
                 "the size of its shape"},
             std::tuple{std::string("{\"a\":{\"dtype\":\"I64\",\"shape\":[4294967296,4294967296],"
                                    "\"data_offsets\":[0,0]}}"),
                        0, "fewer than 2^63 elements"},
             std::tuple{std::string("{\"a\":{\"dtype\":\"I64\",\"shape\":[2305843009213693952],"
                                    "\"data_offsets\":[0,0]}}"),
                        0, "the size of its shape"},
             std::tuple{
                 std::string("{\"a\":{\"dtype\":\"I8\",\"shape\":[-1],\"data_offsets\":[0,1]}}"), 1,
                 "shape of tensor 'a' to be an integer"},
             std::tuple{std::string("{\"a\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0,1],"
                                    "\"x\":1}}"),
                        1, "no key 'x'"},
         })
        CHECK_THROWS(FileError, part, read(header, static_cast<size_t>(data)));
    CHECK_THROWS(FileError, "a safetensors file, got 0 bytes", load({}));
    CHECK_THROWS(FileError, "header of at most 0 bytes, got 18446744073709551615",
                 load(Bytes(8, '\xff')));
}

void test_wrong_models(const Bytes &file) {
    const bool packed = header_of(file).find("\"columns\"") != std::string::npos;
    for (const auto &[from, to, part] : {
             std::tuple{"quant-gru-frozen", "quant-gru-other!", "got 'quant-gru-other!'"},
             std::tuple{packed ? "\"version\":\"2\"" : "\"version\":\"1\"", "\"version\":\"3\"",
                        "Expected version '1' or '2'"},
             std::tuple{"\"batch_first\":\"", "\"batch_first\":\"x", "'true' or 'false'"},
             std::tuple{"\"document\":", "\"documents\":", "Expected key 'document'"},
             std::tuple{"\\\"hidden_size\\\":", "\\\"hidden_size\\\":1",
                        packed ? "Expected " : "to have the shape"},
             std::tuple{"\\\"input_size\\\":", "\\\"input_size\\\":-",
                        "input_size to be an integer"},
             std::tuple{"\\\"num_layers\\\":", "\\\"num_layers\\\":1", "cells, got"},
             packed ? std::tuple{"\"integers_l0\"", "\"integers_lx\"", "tensor 'integers_l0'"}
                    : std::tuple{"\"sum.output.h_l0\"", "\"sum.output.x_l0\"",
                                 "tensor 'sum.output.h_l0'"},
             std::tuple{"__metadata__", "__metadatx__", "to have no key 'format'"},
         })
        CHECK_THROWS(FileError, part, load(replaced(file, from, to)));
    if (packed)
        for (const auto &[from, to, part] : {
                 std::tuple{"\"columns\"", "\"columnx\"", "Expected tensor 'columns', got none"},
                 std::tuple{"\\\"tables\\\":[0", "\\\"tables\\\":[1", "in [0, 0], got 1"},
                 std::tuple{"\\\"tables\\\":[0,", "\\\"tables\\\":[", "Expected 3 tables"},
                 std::tuple{"\\\"is_unsigned\\\":\\\"", "\\\"is_unsigned\\\":\\\"2",
                            "widths and signs of 17 operators"},
                 std::tuple{"\\\"bitwidth\\\":[", "\\\"bitwidth\\\":[33,",
                            "widths and signs of 17 operators"},
                 std::tuple{"\\\"tables\\\":", "\\\"pinned\\\":[2147483648,0,0,0],\\\"tables\\\":",
                            "columns"},
             })
            CHECK_THROWS(FileError, part, load(replaced(file, from, to)));
    Bytes longer = file;
    longer.push_back(0);
    CHECK_THROWS(FileError, "bytes of data, got", load(longer));
}

void test_files() {
    CHECK_THROWS(FileError, "Expected a readable file", Model::load("/nowhere/gru.safetensors"));
    CHECK_THROWS(FileError, "(file '/nowhere/gru.safetensors')",
                 Model::load("/nowhere/gru.safetensors"));
    CHECK_THROWS(FileError, "Expected a regular file", Model::load("/"));
}

// Loads a file and runs it. Returns whether it is valid.
bool runs(const Bytes &file, std::mt19937 &random) {
    try {
        const Model model = load(file);
        const quant_gru::Shape &s = model.shape();
        if (s.input_size > 4096 || s.hidden_size > 4096 || s.num_layers > 16) return true;
        std::vector<float> x(static_cast<size_t>(6 * s.input_size));
        std::vector<float> y(static_cast<size_t>(6 * s.hidden_size * s.directions));
        for (float &each : x) each = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-29f;
        quant_gru::RunOptions options;
        options.threads = 1;
        model.run(x.data(), 3, 2, y.data(), options);
        return true;
    } catch (const FileError &) {
        return false;
    }
}

// Numbers at which arithmetic overflows.
int64_t extreme(std::mt19937 &random) {
    const int64_t power = int64_t{1} << random() % 63;
    const int64_t found[] = {0, -1, 1, INT64_MAX, INT64_MIN, power, power - 1, -power, power + 1};
    return found[random() % 9];
}

void mutate(Bytes &file, std::mt19937 &random) {
    uint64_t header;
    std::memcpy(&header, file.data(), 8);
    for (unsigned count = 1 + random() % 3; count > 0; --count) {
        const bool in_data = random() % 3 && 8 + header < file.size();
        const size_t first = in_data ? 8 + static_cast<size_t>(header) : 0;
        const size_t place = first + random() % (file.size() - first);
        switch (random() % 4) {
            case 0:
                file[place] = static_cast<char>(random());
                break;
            case 1:
                file[place] = static_cast<char>(file[place] ^ 1 << random() % 8);
                break;
            case 2: {
                // an aligned word, as most numbers of the data are
                const size_t word = first + (place - first) / 8 * 8;
                const int64_t value = extreme(random);
                std::memcpy(file.data() + word, &value, std::min<size_t>(8, file.size() - word));
                break;
            }
            default:
                if (!in_data && random() % 8 == 0)
                    file.resize(place + 1);
                else
                    file[place] = "0123456789-.\"{}[],:eE"[random() % 21];
        }
    }
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 2) return 2;
    const int mutations = count > 2 ? std::atoi(arguments[2]) : 200;
    test_safetensors();
    test_files();
    std::mt19937 random(1);
    int valid = 0, total = 0;
    for (const golden::Case &c : golden::read_cases(arguments[1])) {
        CHECK(runs(c.file, random));
        test_wrong_models(c.file);
        for (int i = 0; i < mutations; ++i, ++total) {
            Bytes file = c.file;
            mutate(file, random);
            valid += runs(file, random);
        }
    }
    // The changes reach beyond the first check, and not all of them are seen.
    CHECK(mutations < 8 || (valid > 0 && valid < total));
    std::printf("%d of %d changed files are valid\n", valid, total);
    return failures != 0;
}
