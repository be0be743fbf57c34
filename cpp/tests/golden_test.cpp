// Runs golden files of tests/cpp/make_golden.py and compares every bit with Python's results.
//
//     golden_test FILE..
//
// QUANT_GRU_CPU selects the instruction set.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "quant_gru/model.hpp"

namespace {

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

template <class T>
const T *address(const std::vector<T> &array) {
    return array.empty() ? nullptr : array.data();
}

// Whether two arrays have the same bits, or NaN in the same places.
bool equal(const Floats &a, const Floats &b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i) {
        const bool both_nan = a[i] != a[i] && b[i] != b[i];
        if (!both_nan && std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) return false;
    }
    return true;
}

struct Case {
    std::vector<char> file;
    int64_t T, N;
    Floats x, h0;
    std::vector<int64_t> lengths;
    Floats y, h_n;
};

Case read_case(Reader &reader) {
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

bool whole_sequence(const quant_gru::Model &model, const Case &c, int threads) {
    Floats y(c.y.size(), -1.f), h_n(c.h_n.size(), -1.f);
    quant_gru::RunOptions options;
    options.h0 = address(c.h0);
    options.h_n = h_n.data();
    options.lengths = address(c.lengths);
    options.threads = threads;
    model.run(c.x.data(), c.T, c.N, y.data(), options);
    return equal(y, c.y) && equal(h_n, c.h_n);
}

// Twice, because `reset` must restore the zero state.
bool step_by_step(const quant_gru::Model &model, const Case &c) {
    const quant_gru::Shape &s = model.shape();
    const int64_t C = s.input_size, H = s.hidden_size;
    quant_gru::Stream stream = model.stream(c.N);
    Floats x(static_cast<size_t>(c.N * C)), y(static_cast<size_t>(c.N * H));
    for (int pass = 0; pass < 2; ++pass, stream.reset())
        for (int64_t t = 0; t < c.T; ++t) {
            Floats expected;
            for (int64_t n = 0; n < c.N; ++n) {
                const int64_t row = s.batch_first ? n * c.T + t : t * c.N + n;
                std::copy_n(c.x.begin() + row * C, C, x.begin() + n * C);
                expected.insert(expected.end(), c.y.begin() + row * H, c.y.begin() + (row + 1) * H);
            }
            stream.step(x.data(), y.data());
            if (!equal(y, expected)) return false;
        }
    return true;
}

bool run_case(const Case &c) {
    const auto model = quant_gru::Model::load(c.file.data(), c.file.size());
    bool good = whole_sequence(model, c, 1) && whole_sequence(model, c, 3);
    if (model.shape().directions == 1 && c.h0.empty() && c.lengths.empty())
        good = good && step_by_step(model, c);
    return good;
}

int run_file(const char *path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) throw std::runtime_error(std::string("Expected a readable file, got ") + path);
    Reader reader({std::istreambuf_iterator<char>(stream), {}});
    const int64_t count = reader.word();
    int wrong = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Case c = read_case(reader);
        if (run_case(c)) continue;
        std::printf("%s: case %lld differs\n", path, static_cast<long long>(i));
        ++wrong;
    }
    std::printf("%s: %d of %lld cases differ\n", path, wrong, static_cast<long long>(count));
    return count > 0 ? wrong : 1;
}

}  // namespace

int main(int count, char **arguments) {
    try {
        int wrong = count < 2;
        for (int i = 1; i < count; ++i) wrong += run_file(arguments[i]);
        return wrong != 0;
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
