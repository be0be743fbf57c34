// Runs golden files and compares every bit with Python's results.
//
//     golden_test FILE..
//
// QUANT_GRU_CPU selects the instruction set. If this machine does not support it, the result is 77.
#include "golden.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "quant_gru/model.hpp"

namespace {

using golden::Case;
using golden::Floats;

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
    const std::vector<Case> cases = golden::read_cases(path);
    int wrong = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
        if (run_case(cases[i])) continue;
        std::printf("%s: case %zu differs\n", path, i);
        ++wrong;
    }
    std::printf("%s: %d of %zu cases differ\n", path, wrong, cases.size());
    return wrong;
}

constexpr int kSkipped = 77;

bool is_supported(const char *path) {
    const std::vector<Case> cases = golden::read_cases(path);
    try {
        quant_gru::Model::load(cases[0].file.data(), cases[0].file.size());
        return true;
    } catch (const quant_gru::ArgumentError &error) {
        std::printf("%s\n", error.what());
        return false;
    }
}

}  // namespace

int main(int count, char **arguments) {
    try {
        if (count > 1 && !is_supported(arguments[1])) return kSkipped;
        int wrong = count < 2;
        for (int i = 1; i < count; ++i) wrong += run_file(arguments[i]);
        return wrong != 0;
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
