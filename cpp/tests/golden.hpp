// Golden files of tests/cpp/make_golden.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace golden {

using Floats = std::vector<float>;

// Reads words of 8 bytes, and arrays, each after its size in bytes and padded to words.
class Reader {
 public:
    explicit Reader(std::vector<char> bytes) : bytes_(std::move(bytes)) {}

    int64_t word() {
        int64_t value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }

    template <class T>
    std::vector<T> array() {
        const auto size = static_cast<size_t>(word());
        std::vector<T> found(size / sizeof(T));
        const char *from = take((size + 7) / 8 * 8);
        if (size) std::memcpy(found.data(), from, size);
        return found;
    }

 private:
    const char *take(size_t size) {
        if (size > bytes_.size() - at_) throw std::runtime_error("Expected more bytes");
        at_ += size;
        return bytes_.data() + at_ - size;
    }

    std::vector<char> bytes_;
    size_t at_ = 0;
};

struct Case {
    std::vector<char> file;
    int64_t T, N;
    Floats x, h0;
    std::vector<int64_t> lengths;
    Floats y, h_n;
};

inline Case read_case(Reader &reader) {
    Case c;
    c.file = reader.array<char>();
    c.T = reader.word();
    c.N = reader.word();
    c.x = reader.array<float>();
    c.h0 = reader.array<float>();
    c.lengths = reader.array<int64_t>();
    c.y = reader.array<float>();
    c.h_n = reader.array<float>();
    return c;
}

inline Reader open(const std::string &path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) throw std::runtime_error("Expected a readable file, got " + path);
    return Reader({std::istreambuf_iterator<char>(stream), {}});
}

// Reads all cases of a file.
inline std::vector<Case> read_cases(const std::string &path) {
    Reader reader = open(path);
    std::vector<Case> cases;
    for (int64_t count = reader.word(); count > 0; --count) cases.push_back(read_case(reader));
    if (cases.empty()) throw std::runtime_error("Expected cases, got none in " + path);
    return cases;
}

}  // namespace golden
