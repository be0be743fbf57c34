// Runs the golden file of tests/cpp/make_quantization_golden.py: calibrations, parameter files,
// frozen files and passes must equal Python's.
//
//     quantization_test FILE
#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "cpu/core/threads.hpp"
#include "golden.hpp"
#include "quant_gru/calibration.hpp"
#include "quant_gru/gru_interface.hpp"
#include "quant_gru/model.hpp"

namespace {

using namespace quant_gru;
using golden::Reader;

std::string text(Reader &reader) {
    const auto bytes = reader.array<char>();
    return std::string(bytes.begin(), bytes.end());
}

void check_calibration(Reader &reader) {
    const QuantConfig config = QuantConfig::from_text(text(reader));
    const std::string method = text(reader);
    FloatGRU gru;
    gru.shape.input_size = reader.word();
    gru.shape.hidden_size = reader.word();
    gru.shape.num_layers = reader.word();
    gru.shape.bidirectional = reader.word() != 0;
    const int64_t T = reader.word(), N = reader.word();
    const auto x = reader.array<float>();
    const int64_t count = 4 * gru.shape.num_layers * gru.shape.directions();
    for (int64_t i = 0; i < count; ++i) gru.tensors.push_back(reader.array<float>());
    const std::string expected = text(reader), file = text(reader);

    Calibrator calibrator(gru.shape, gru.cells(), method_of(method));
    calibrator.collect(x.data(), T, N);
    const Parameters parameters = calibrator.finalize(config);
    CHECK(parameters.to_text() == expected);
    CHECK(Parameters::from_text(expected).to_text() == expected);
    CHECK(freeze(parameters, gru.cells()) == file);
    CHECK(freeze(Parameters::from_text(expected), gru.cells()) == file);
    CHECK(Model::load(file.data(), file.size()).shape().hidden_size == gru.shape.hidden_size);
    CHECK_THROWS(ArgumentError, "Expected weights", freeze(parameters, {}));
    CHECK(cut_biases(parameters, gru.cells()).empty());
    CHECK_THROWS(ArgumentError, "Expected weights", cut_biases(parameters, {}));
}

template <class T>
std::vector<T> converted(const std::vector<double> &values) {
    return std::vector<T>(values.begin(), values.end());
}

// The transpose of a (rows, columns).
template <class T>
std::vector<T> transposed(const std::vector<T> &a, size_t rows, size_t columns) {
    std::vector<T> to(a.size());
    for (size_t i = 0; i < rows; ++i)
        for (size_t j = 0; j < columns; ++j) to[j * rows + i] = a[i * columns + j];
    return to;
}

struct FloatCase {
    int T, N, C, H;
    std::vector<double> W, R, bx, br, x, h0, mask, grad, y, dx, dh, dW, dR, dbx, dbr;
};

template <class T>
void check_passes(const FloatCase &c, double tolerance, int threads) {
    thread_price = threads > 1 ? 1e-9 : 1;
    const auto n = [](int a, int b, int d) { return static_cast<size_t>(a * b * d); };
    const auto W = converted<T>(c.W), R = converted<T>(c.R), bx = converted<T>(c.bx);
    const auto br = converted<T>(c.br), x = converted<T>(c.x), mask = converted<T>(c.mask);
    const auto width = static_cast<size_t>(3 * c.H);
    auto h = converted<T>(c.h0), dh_new = std::vector<T>(h.size());
    h.resize(n(c.T + 1, c.N, c.H));
    for (double value : c.grad) dh_new.push_back(static_cast<T>(value));
    std::vector<T> v(n(c.T, c.N, 4 * c.H)), Wx(n(c.T, c.N, 3 * c.H)), Rh(n(1, c.N, 3 * c.H));
    const T *held = mask.empty() ? nullptr : mask.data();
    ForwardPass<T> forward(true, c.N, c.C, c.H);
    forward.set_threads(threads);
    forward.Run(c.T, W.data(), R.data(), bx.data(), br.data(), x.data(), h.data(), v.data(),
                Wx.data(), Rh.data(), 0.3f, held);
    std::vector<T> dx(x.size()), dW(W.size()), dR(R.size()), dbx(width), dbr(width);
    std::vector<T> dh(c.h0.size()), dp(Wx.size()), dq(Wx.size());
    const auto W_t = transposed(W, static_cast<size_t>(c.C), width);
    const auto R_t = transposed(R, static_cast<size_t>(c.H), width);
    const auto x_t = transposed(x, n(c.T, c.N, 1), static_cast<size_t>(c.C));
    BackwardPass<T> backward(c.N, c.C, c.H);
    backward.set_threads(threads);
    backward.Run(c.T, W_t.data(), R_t.data(), bx.data(), br.data(), x_t.data(), h.data(), v.data(),
                 dh_new.data(), dx.data(), dW.data(), dR.data(), dbx.data(), dbr.data(), dh.data(),
                 dp.data(), dq.data(), held);
    const auto close = [tolerance](const T *found, const std::vector<double> &expected) {
        double most = 1;
        for (double value : expected) most = std::max(most, std::fabs(value));
        for (size_t i = 0; i < expected.size(); ++i)
            if (!(std::fabs(static_cast<double>(found[i]) - expected[i]) <= tolerance * most))
                return false;
        return true;
    };
    CHECK(close(h.data() + c.h0.size(), c.y));
    CHECK(close(dx.data(), c.dx));
    CHECK(close(dh.data(), c.dh));
    CHECK(close(dW.data(), c.dW));
    CHECK(close(dR.data(), c.dR));
    CHECK(close(dbx.data(), c.dbx));
    CHECK(close(dbr.data(), c.dbr));
}

void check_float(Reader &reader) {
    FloatCase c;
    for (int *size : {&c.T, &c.N, &c.C, &c.H}) *size = static_cast<int>(reader.word());
    for (auto *values : {&c.W, &c.R, &c.bx, &c.br, &c.x, &c.h0, &c.mask, &c.grad, &c.y, &c.dx,
                         &c.dh, &c.dW, &c.dR, &c.dbx, &c.dbr})
        *values = reader.array<double>();
    for (int threads : {1, 3}) {
        check_passes<double>(c, 1e-13, threads);
        check_passes<float>(c, 1e-6, threads);
    }
}

template <class T>
struct CodeCase {
    size_t steps, N, C, H;
    const std::vector<T> &W, &R;
    const std::vector<int32_t> &bx, &br;
    const std::vector<T> &x, &h;
    const std::vector<float> &scale, &zero;
};

// The transpose of step t of values (T, N, n).
template <class T>
std::vector<T> transposed_step(const std::vector<T> &from, size_t t, size_t N, size_t n) {
    const auto start = from.begin() + static_cast<std::ptrdiff_t>(t * N * n);
    return transposed(std::vector<T>(start, start + static_cast<std::ptrdiff_t>(N * n)), N, n);
}

// dx, dh, dW, dR, dbx and dbr, for gradients of the outputs that are 1, -1, 1, ..
template <class T>
std::vector<std::vector<float>> gradients_of(const CodeCase<T> &c, bool by_steps, int threads) {
    const size_t N = c.N, C = c.C, H = c.H;
    const auto W_t = transposed(c.W, C, 3 * H), R_t = transposed(c.R, H, 3 * H);
    std::vector<float> grad(c.h.size()), dx(c.x.size()), dh(N * H);
    std::vector<float> dW(c.W.size()), dR(c.R.size()), dbx(3 * H), dbr(3 * H);
    for (size_t i = 0; i < grad.size(); ++i) grad[i] = i % 2 ? -1.f : 1.f;
    BackwardPass<T> pass(static_cast<int>(N), static_cast<int>(C), static_cast<int>(H));
    pass.set_threads(threads);
    thread_price = threads > 1 ? 1e-9 : 1;  // threads, however little work there is
    if (!by_steps)
        pass.Run(static_cast<int>(c.steps), W_t.data(), R_t.data(), c.bx.data(), c.br.data(),
                 transposed(c.x, c.steps * N, C).data(), c.h.data(), nullptr, grad.data(),
                 dx.data(), dW.data(), dR.data(), dbx.data(), dbr.data(), dh.data(), nullptr,
                 nullptr, nullptr, c.scale.data(), c.zero.data());
    for (size_t t = c.steps; by_steps && t-- > 0;)
        pass.Iterate(W_t.data(), R_t.data(), c.bx.data(), c.br.data(),
                     transposed_step(c.x, t, N, C).data(), transposed_step(c.h, t, N, H).data(),
                     nullptr, grad.data() + (t + 1) * N * H, dx.data() + t * N * C, dW.data(),
                     dR.data(), dbx.data(), dbr.data(), dh.data(), nullptr, nullptr, nullptr,
                     c.scale.data(), c.zero.data());
    return {dx, dh, dW, dR, dbx, dbr};
}

template <class T>
void check_codes(Reader &reader) {
    int sizes[4];
    for (int &size : sizes) size = static_cast<int>(reader.word());
    const auto codes = [&reader] {
        const auto values = reader.array<int32_t>();
        return std::vector<T>(values.begin(), values.end());
    };
    const auto W = codes(), R = codes();
    const auto bx = reader.array<int32_t>(), br = reader.array<int32_t>();
    const auto x = codes();
    auto h = codes();
    const auto y = codes();
    const auto scale = reader.array<float>(), zero = reader.array<float>();
    const size_t before = h.size();
    h.resize(before + y.size());
    ForwardPass<T> pass(false, sizes[1], sizes[2], sizes[3]);
    for (int round = 0; round < 2; ++round) {
        std::fill(h.begin() + static_cast<std::ptrdiff_t>(before), h.end(), T(0));
        pass.Run(sizes[0], W.data(), R.data(), bx.data(), br.data(), x.data(), h.data(), nullptr,
                 nullptr, nullptr, 0, nullptr, scale.data(), zero.data());
        CHECK(std::equal(y.begin(), y.end(), h.begin() + static_cast<std::ptrdiff_t>(before)));
    }
    const auto n = [&sizes](int i) { return static_cast<size_t>(sizes[i]); };
    const CodeCase<T> c{n(0), n(1), n(2), n(3), W, R, bx, br, x, h, scale, zero};
    const auto whole = gradients_of(c, false, 1), divided = gradients_of(c, false, 3);
    const auto steps = gradients_of(c, true, 1);
    for (size_t i = 0; i < whole.size(); ++i) {
        CHECK(whole[i] == divided[i]);
        CHECK(std::any_of(whole[i].begin(), whole[i].end(), [](float g) { return g != 0; }));
    }
    // of inputs and states; sums over steps round at other places
    CHECK(whole[0] == steps[0]);
    CHECK(whole[1] == steps[1]);
}

// The arguments of Haste's interface, in their order.
template <class Class, class T, class AccumT>
constexpr bool has_arguments =
    std::is_convertible_v<decltype(&Class::Run),
                          void (Class::*)(int steps, const T *W, const T *R, const AccumT *bx,
                                          const AccumT *br, const T *x, T *h, T *v, AccumT *tmp_Wx,
                                          AccumT *tmp_Rh, float zoneout_prob, const T *zoneout_mask,
                                          const float *scale, const float *zero_point)>;
static_assert(has_arguments<ForwardPass<int8_t, int32_t>, int8_t, int32_t>);
static_assert(has_arguments<ForwardPass<int16_t, int32_t>, int16_t, int32_t>);
static_assert(std::is_constructible_v<ForwardPass<int8_t>, const bool, const int, const int,
                                      const int, const cublasHandle_t &, const cudaStream_t &>);

void check_arguments() {
    CHECK_THROWS(ArgumentError, "hidden_size", ForwardPass<float>(true, 1, 1, 0));
    CHECK_THROWS(ArgumentError, "batch_size", BackwardPass<double>(-1, 1, 1));
    CHECK_THROWS(ArgumentError, "input_size", BackwardPass<int8_t>(1, 0, 1));
    ForwardPass<float> pass(false, 1, 1, 1);
    CHECK_THROWS(ArgumentError, "threads", pass.set_threads(-1));
    CHECK_THROWS(ArgumentError, "steps",
                 pass.Run(-1, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                          nullptr, nullptr, 0, nullptr));
    CHECK_THROWS(ArgumentError, "zoneout_prob",
                 pass.Run(0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                          nullptr, 2, nullptr));
    CHECK_THROWS(FileError, "readable", QuantConfig::from_json("/nowhere/config.json"));
    CHECK_THROWS(FileError, "readable", Parameters::load("/nowhere/params.json"));
    CHECK_THROWS(FileError, "readable", FloatGRU::load("/nowhere/weights.safetensors"));
    CHECK_THROWS(FileError, "writable", QuantConfig().to_json("/nowhere/config.json"));
    CHECK_THROWS(ArgumentError, "got none", Calibrator({}, {{}}).finalize({}));
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 2) return 1;
    Reader reader = golden::open(arguments[1]);
    for (int64_t n = reader.word(); n > 0; --n) check_calibration(reader);
    for (int64_t n = reader.word(); n > 0; --n) check_float(reader);
    for (int64_t n = reader.word(); n > 0; --n) {
        if (reader.word() == 8)
            check_codes<int8_t>(reader);
        else
            check_codes<int16_t>(reader);
    }
    check_arguments();
    return failures != 0;
}
