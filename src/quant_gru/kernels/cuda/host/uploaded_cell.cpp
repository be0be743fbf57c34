#include "cuda/host/uploaded_cell.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "c99/fixed_point.h"

namespace quant_gru::cuda {
namespace {

int64_t code_of(const MatrixNumbers &w, size_t i) {
    switch (w.kind) {
        case Container::i8:
            return static_cast<const int8_t *>(w.codes)[i];
        case Container::i16:
            return static_cast<const int16_t *>(w.codes)[i];
        default:
            return static_cast<const int32_t *>(w.codes)[i];
    }
}

bool is_power(double v) {
    int exponent;
    return std::frexp(v, &exponent) == 0.5;
}

// The same numbers with the nearest code of x as its zero point; the input bias has the rest.
CellNumbers inside(CellNumbers n) {
    n.x = n.x.inner();
    return n;
}

}  // namespace

Address Arrays::add(const void *values, size_t bytes) {
    const Address address = reserve(bytes);
    if (bytes) memory_.back().upload(values, bytes);
    return address;
}

Address Arrays::reserve(size_t bytes) {
    memory_.emplace_back(device_, bytes);
    return memory_.back().address();
}

UploadedCell::UploadedCell(Device &device, const CellInput &input)
    : UploadedCell(device, input, std::make_shared<const GateNumbers>(inside(input.numbers))) {}

UploadedCell::UploadedCell(Device &device, const CellInput &input,
                           std::shared_ptr<const GateNumbers> gates)
    : Cell(input.numbers, gates, gates->form(device.has_clusters()), input.between),
      arrays_(device) {
    for (size_t i = 0; i < 3; ++i) {
        const TableNumbers &t = gates_->table(i);
        TableAddresses &to = places_[i];
        if (!tables()[i].direct.empty()) to.direct = arrays_.add(tables()[i].direct);
        if (!tables()[i].lines.empty()) to.lines = arrays_.add(tables()[i].lines);
        to.bounds = arrays_.add(t.bounds, static_cast<size_t>(t.segments) * sizeof(int64_t));
        to.coefficients = arrays_.add(
            t.coefficients, static_cast<size_t>(t.segments * (t.degree + 1)) * sizeof(int64_t));
    }
    for (int which = 0; which < 2; ++which) {
        const MatrixNumbers &w = weights_of(n_, which);
        auto &m = m_[static_cast<size_t>(which)];
        for (int64_t row = 0; row < 3 * H(); ++row)
            m.push_back(std::ldexp(static_cast<double>(w.M[row]), static_cast<int>(-w.k[row])));
        matrices_[static_cast<size_t>(which)] = matrix(which);
    }
    const uint8_t finite = 1;  // integers are
    finite_ = arrays_.add(&finite, sizeof finite);
    if (!form_.narrow) return;
    const std::array<int32_t, 2> exact[] = {exact_of_W(), exact_of_R()};
    for (size_t which = 0; which < 2; ++which)
        exact_[which] = arrays_.add(exact[which].data(), sizeof exact[which]);
    if (projects_bytes()) add_bytes();
    matrices_[0].codes = codes(0);
}

Address UploadedCell::codes(int which) {
    const MatrixNumbers &w = weights_of(n_, which);
    return arrays_.add(w.codes, static_cast<size_t>(3 * H() * w.inputs) *
                                    static_cast<size_t>(container_bytes(w.kind)));
}

MatrixC UploadedCell::R() {
    const std::lock_guard<std::mutex> lock(mutex_);
    // a forward reads R in other orders only
    if (!matrices_[1].codes) matrices_[1].codes = codes(1);
    return matrices_[1];
}

MatrixC UploadedCell::matrix(int which) {
    const MatrixNumbers &w = weights_of(n_, which);
    const auto bytes = static_cast<size_t>(3 * H()) * sizeof(int64_t);
    MatrixC c = row_numbers(n_, which);
    c.bias = arrays_.add(w.bias, bytes);
    c.M = arrays_.add(w.M, bytes);
    c.k = arrays_.add(w.k, bytes);
    if (form_.narrow) c.m = arrays_.add(m_[static_cast<size_t>(which)]);
    c.kind = static_cast<int64_t>(w.kind);
    return c;
}

std::array<MatrixC, 2> UploadedCell::transposed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (transposed_[0].codes) return transposed_;
    for (int which = 0; which < 2; ++which) {
        const MatrixNumbers &w = weights_of(n_, which);
        const auto rows = static_cast<size_t>(3 * H()), columns = static_cast<size_t>(w.inputs);
        std::vector<int32_t> codes(rows * columns);
        for (size_t row = 0; row < rows; ++row)
            for (size_t i = 0; i < columns; ++i)
                codes[i * rows + row] = static_cast<int32_t>(code_of(w, row * columns + i));
        MatrixC &c = transposed_[static_cast<size_t>(which)];
        c = matrices_[static_cast<size_t>(which)];
        c.kind = static_cast<int64_t>(Container::i32);
        c.codes = arrays_.add(codes);
    }
    return transposed_;
}

// The flags of weights/derived.cuh, for W x.
std::array<int32_t, 2> UploadedCell::exact_of_W() const {
    const bool two = x_planes() == 2, long_sums = two && C() > 512;
    const double added = added_to_bytes(n_);
    std::array<int32_t, 2> all{1, 1};
    for (int64_t row = 0; row < 3 * H(); ++row) {
        int64_t size = 0, sum = 0;
        for (int64_t i = 0; i < C(); ++i) {
            const int64_t code = code_of(n_.W, static_cast<size_t>(row * C() + i));
            size += std::llabs(code);
            sum += code;
        }
        const int64_t reach = size * n_.x.reach() + std::llabs(n_.W.bias[row]);
        const double m = m_[0][static_cast<size_t>(row)], whole = static_cast<double>(reach);
        bool first, second;
        if (two) {
            const int64_t folded = n_.W.bias[row] + (x_offset() - n_.x.zero) * sum + 128 * sum;
            const double units = std::ldexp(m, 31);
            const bool held = long_sums ? std::llabs(folded) < 1 << 30 : reach < int64_t{1} << 31;
            first = held && whole * m < 1073741824.0 && is_normal(m);
            second = first && units == std::nearbyint(units) && m <= 2;
        } else {
            const bool normal = reach < 1 << 24 && is_normal(m);
            first = normal && whole * m < kMagicFloat;
            const double most = whole * std::max(m, 1.0) + added / std::min(m, 1.0);
            second = normal && is_power(m) && most <= 16777216.0;
        }
        all[0] = all[0] && first;
        all[1] = all[1] && second;
    }
    return all;
}

// The flags of weights/derived.cuh, for R h.
std::array<int32_t, 2> UploadedCell::exact_of_R() const {
    const int64_t middle = (H() + 127) / 128 * 64;
    std::array<int32_t, 2> all{1, 1};
    for (int64_t row = 0; row < 3 * H(); ++row) {
        int64_t sizes[2] = {0, 0}, sum = 0;
        for (int64_t i = 0; i < H(); ++i) {
            const int64_t code = code_of(n_.R, static_cast<size_t>(row * H() + i));
            sizes[i >= middle] += std::llabs(code);
            sum += code;
        }
        const int64_t size = sizes[0] + sizes[1];
        const int64_t reach = size * n_.h.reach() + std::llabs(n_.R.bias[row]);
        const double m = m_[1][static_cast<size_t>(row)];
        bool first, second;
        if (form_.in_int32()) {
            // bounds of stored codes; the kernel may store low bytes less 128
            const int64_t folded = n_.R.bias[row] + (byte_offset(n_.h) - n_.h.zero) * sum;
            const int64_t halves =
                std::max(sizes[0], sizes[1]) * ((1 << 15) + 128) + size * 128 + std::llabs(folded);
            const double units = std::ldexp(m, 32);
            const bool whole = units == std::nearbyint(units);
            first = reach < int64_t{1} << 31 && units < 2147483648.0 && whole;
            second = halves < int64_t{1} << 31 && units < 1073741824.0 && whole;
        } else {
            first = second = reach < 1 << 24 && is_normal(m);
        }
        all[0] = all[0] && first;
        all[1] = all[1] && second;
    }
    return all;
}

void UploadedCell::add_bytes() {
    const int64_t rows = 3 * H(), columns = gemm_sizes(n_, 0).columns;
    bytes_.padded = gemm_sizes(n_, 0).padded;
    std::vector<int8_t> weights(static_cast<size_t>(columns * bytes_.padded));
    std::vector<int64_t> folded;
    std::vector<int32_t> folded_bytes;
    std::vector<float> m_float(m_[0].begin(), m_[0].end());
    for (int64_t row = 0; row < rows; ++row) {
        int64_t sum = 0;
        for (int64_t i = 0; i < C(); ++i) {
            const int64_t code = code_of(n_.W, static_cast<size_t>(row * C() + i));
            weights[static_cast<size_t>(row * bytes_.padded + i)] = static_cast<int8_t>(code);
            sum += code;
        }
        const int64_t offset = x_offset() - n_.x.zero + (x_planes() == 2 ? 128 : 0);
        folded.push_back(n_.W.bias[row] + offset * sum);
        folded_bytes.push_back(static_cast<int32_t>(folded.back()));
    }
    bytes_.weights = arrays_.add(weights);
    bytes_.folded = arrays_.add(folded);
    bytes_.folded_bytes = arrays_.add(folded_bytes);
    bytes_.m_float = arrays_.add(m_float);
}

GemmWeights UploadedCell::gemm(int which) {
    const std::lock_guard<std::mutex> lock(mutex_);
    GemmWeights &g = gemm_[static_cast<size_t>(which)];
    if (g.weights) return g;
    const MatrixNumbers &w = weights_of(n_, which);
    const QuantizerNumbers &operand = operand_of(n_, which);
    const int64_t rows = 3 * H(), features = w.inputs;
    g = gemm_sizes(n_, which);
    std::vector<int8_t> weights(static_cast<size_t>((g.columns + 2) * g.padded));
    const auto at = [&](int64_t row, int64_t i) -> int8_t & {
        return weights[static_cast<size_t>(row * g.padded + i)];
    };
    std::vector<int64_t> folded;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t sum = 0;
        for (int64_t i = 0; i < features; ++i) {
            const int64_t code = code_of(w, static_cast<size_t>(row * features + i));
            sum += code;
            if (g.planes == 1) {
                at(row, i) = static_cast<int8_t>(code);
            } else {
                at(row, i) = static_cast<int8_t>(qg_floor_shift(code, 8));
                at(rows + row, i) = static_cast<int8_t>((code & 255) - 128);
                at(2 * rows, i) = 1;
            }
        }
        const int64_t low = planes_of(operand.bits) == 2 ? 128 : 0;
        folded.push_back(w.bias[row] + (byte_offset(operand) - operand.zero + low) * sum);
    }
    g.folded = arrays_.add(folded);
    g.weights = arrays_.add(weights);
    return g;
}

// Bytes [tile of 64 units][panel of 128 features][gate][unit][16 bytes], where the place of 16
// bytes is combined with the unit by XOR.
Address UploadedCell::tiles() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (tiles_) return tiles_;
    const int64_t tiles = (H() + 63) / 64, panels = (C() + 127) / 128;
    std::vector<int8_t> bytes(static_cast<size_t>(tiles * panels * 3 * 64 * 128));
    for (int64_t gate = 0; gate < 3; ++gate)
        for (int64_t unit = 0; unit < H(); ++unit)
            for (int64_t k = 0; k < C(); ++k) {
                const int64_t row = unit % 64, place = k % 128 / 16 ^ row % 8;
                int64_t at = ((unit / 64 * panels + k / 128) * 3 + gate) * 64 + row;
                at = (at * 8 + place) * 16 + k % 16;
                const int64_t from = (gate * H() + unit) * C() + k;
                bytes[static_cast<size_t>(at)] =
                    static_cast<int8_t>(code_of(n_.W, static_cast<size_t>(from)));
            }
    return tiles_ = arrays_.add(bytes);
}

Fragments UploadedCell::fragments(int64_t features, int64_t units) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto [found, is_new] = fragments_.try_emplace({features, units});
    if (is_new) found->second = packed(features, units);
    return found->second;
}

// Bytes in the order [plane][group of 16 units][block of 64 features][j][gate][half][row8][lane8]
// [quad][i], for unit 16 group + 8 row8 + lane8 and feature 64 block + 16 quad + 8 j + 4 half + i.
Fragments UploadedCell::packed(int64_t features, int64_t units) {
    const int planes = form_.weight_bytes;
    const int64_t blocks = features / 64, plane_bytes = 3 * units * features;
    std::vector<int8_t> bytes(static_cast<size_t>(planes * plane_bytes));
    std::vector<double> bias(static_cast<size_t>(3 * units)), m(bias.size());
    for (int64_t gate = 0; gate < 3; ++gate)
        for (int64_t unit = 0; unit < H(); ++unit) {
            int64_t sum = 0;
            const int64_t row = gate * H() + unit;
            for (int64_t k = 0; k < H(); ++k) {
                const int64_t code = code_of(n_.R, static_cast<size_t>(row * H() + k));
                sum += code;
                int64_t at = (unit / 16) * blocks + k / 64;
                at = (at * 2 + k % 16 / 8) * 3 + gate;
                at = ((at * 2 + k % 8 / 4) * 2 + unit % 16 / 8) * 8 + unit % 8;
                at = (at * 4 + k % 64 / 16) * 4 + k % 4;
                bytes[static_cast<size_t>(at)] = static_cast<int8_t>(code);
                if (planes == 2)
                    bytes[static_cast<size_t>(plane_bytes + at)] =
                        static_cast<int8_t>(qg_floor_shift(code, 8));
            }
            const auto to = static_cast<size_t>(gate * units + unit);
            bias[to] = static_cast<double>(n_.R.bias[row] + (byte_offset(n_.h) - n_.h.zero) * sum);
            m[to] = m_[1][static_cast<size_t>(row)];
        }
    return {arrays_.add(bytes), arrays_.add(bias), arrays_.add(m)};
}

}  // namespace quant_gru::cuda
