#include "cpu/training/weights.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

#include "cpu/core/threads.hpp"

namespace quant_gru {
namespace {

WeightRows rows_of(int bits, bool free_scale, int64_t n) {
    WeightRows w;
    w.n = n;
    w.bits = bits;
    w.free_scale = free_scale;
    w.hi = static_cast<double>((int64_t{1} << (w.bits - 1)) - 1);
    w.lo = -w.hi - 1;
    return w;
}

// Runs f(part) for each part, in one thread per part.
template <class F>
void in_parts(int parts, F f) {
    std::vector<std::thread> others;
    int started = 1;
    try {
        for (; started < parts; ++started) others.emplace_back(f, started);
    } catch (const std::system_error &) {
        // The system has no more threads: this thread runs the remaining parts.
    }
    threads_started += started - 1;
    f(0);
    for (int i = started; i < parts; ++i) f(i);
    for (std::thread &other : others) other.join();
}

double largest_of(const std::vector<double> &scales) {
    return *std::max_element(scales.begin(), scales.end());
}

}  // namespace

Weights::Weights(const WeightsPlan &plan, const std::string &variant)
    : H_(plan.H), finite_(plan.finite), variant_(variant_of(variant)) {
    const size_t channels = 3 * static_cast<size_t>(H_);
    for (size_t which = 0; which < 2; ++which) {
        Operand &o = operands_[which];
        static_cast<WeightTarget &>(o) = plan.targets[which];
        o.rows = rows_of(o.bits, plan.free_scale, o.n);
        o.rows.factors = o.factors;
        o.rows.term_limit = o.term_limit;
        o.bias = rows_of(o.b_bits, plan.free_scale, 1);
        if (o.factors) o.corrected.resize(channels);
        o.found.resize(channels);
        o.b_found.resize(channels);
    }
    zeros_.assign(channels, 0.f);
}

bool Weights::is_last(const std::array<const float *, 4> &values) {
    const size_t channels = 3 * static_cast<size_t>(H_);
    bool same = is_last_;
    for (size_t i = 0; i < 4; ++i) {
        const size_t n = i < 2 ? channels * static_cast<size_t>(operands_[i].rows.n) : channels;
        std::vector<float> &last = last_[i];
        same = same && std::memcmp(last.data(), values[i], n * sizeof(float)) == 0;
        if (!same) last.assign(values[i], values[i] + n);
    }
    is_last_ = true;
    return same;
}

bool Weights::write(std::array<const float *, 2> matrices, std::array<const float *, 2> biases,
                    const uint8_t *dropped, float keep, int threads) {
    const int64_t channels = 3 * static_cast<int64_t>(H_);
    int64_t longest = 1, all = 0;
    for (auto &bias : biases) bias = bias ? bias : zeros_.data();
    if (dropped)
        forget();
    else if (is_last({matrices[0], matrices[1], biases[0], biases[1]}))
        return false;
    for (size_t which = 0; which < 2; ++which) {
        Operand &o = operands_[which];
        o.rows.values = matrices[which];
        o.bias.values = biases[which];
        longest = std::max(longest, o.rows.n);
        all += channels * o.rows.n;
    }
    // A thread pays if it has a few hundred microseconds of work.
    const double pays = (1 << 18) * thread_price;
    const int parts = static_cast<int>(
        std::clamp(std::min(static_cast<double>(all) / pays, 1. * threads), 1., 64.));
    std::vector<float> space(static_cast<size_t>(parts * longest));
    std::atomic<bool> finite{true}, bias_finite{true};
    in_parts(parts, [&](int part) {
        const int64_t first = channels * part / parts, end = channels * (part + 1) / parts;
        float *own = space.data() + part * longest;
        for (Operand &o : operands_) {
            if (!variant_.scales(o.rows, first, end, o.found.data(), own)) finite = false;
            if (!variant_.scales(o.bias, first, end, o.b_found.data(), own)) bias_finite = false;
        }
    });
    *finite_ = finite && bias_finite;
    for (Operand &o : operands_) {
        o.rows.all_finite = finite;
        o.largest = largest_of(o.found);
        o.b_largest = largest_of(o.b_found);
    }
    in_parts(parts, [&](int part) {
        const int64_t first = channels * part / parts, end = channels * (part + 1) / parts;
        for (size_t which = 0; which < 2; ++which)
            settle(operands_[which], which ? dropped : nullptr, keep, first, end,
                   space.data() + part * longest);
    });
    for (Operand &o : operands_) {
        if (!o.factors) continue;
        o.b_largest = largest_of(o.b_found);
        for (int64_t row = 0; row < channels; ++row) write_numbers(o, row, false, keep);
    }
    return true;
}

void Weights::settle(Operand &o, const uint8_t *dropped, float keep, int64_t first, int64_t end,
                     float *space) const {
    for (int64_t row = first; row < end; ++row) {
        const double error = write_codes(o, row, dropped, space);
        if (!o.factors) {
            write_numbers(o, row, dropped, keep);
            continue;
        }
        const auto at = static_cast<size_t>(row);
        const float b = o.bias.values[row], scale = qg_matrix_scale(o.found[at], o.largest);
        o.corrected[at] = qg_corrected(b - b == 0 ? b : 0, error, scale, o.unit_exponent);
    }
    if (!o.factors) return;
    WeightRows bias = o.bias;
    bias.values = o.corrected.data();
    variant_.scales(bias, first, end, o.b_found.data(), space);
}

double Weights::write_codes(const Operand &o, int64_t row, const uint8_t *dropped,
                            float *space) const {
    const float scale = qg_matrix_scale(o.found[static_cast<size_t>(row)], o.largest);
    const int64_t bytes = o.rows.n * (o.rows.bits <= 8 ? 1 : 2);
    return variant_.codes(o.rows, row, scale, dropped ? dropped + row * o.rows.n : nullptr,
                          static_cast<char *>(o.codes) + channel_of(row) * bytes, space);
}

void Weights::write_numbers(const Operand &o, int64_t row, bool dropped, float keep) const {
    const auto at = static_cast<size_t>(row);
    const int64_t c = channel_of(row);
    float scale = qg_matrix_scale(o.found[at], o.largest);
    if (dropped) scale = std::min(scale / keep, static_cast<float>(QG_LARGEST_SCALE));
    const float b = o.factors ? o.corrected[at] : o.bias.values[row];
    const float b_scale = qg_bias_scale(o.b_found[at], o.b_largest);
    const int64_t b_code = b - b == 0 ? qg_code(b, b_scale, o.bias.lo, o.bias.hi) : 0;
    const qg_channel n = qg_channel_of(b_code, b_scale, scale, o.operand_scale, o.result_scale,
                                       o.b_unit, o.limit, o.significant);
    o.scales[c] = scale;
    o.b_scales[c] = b_scale;
    // All supported processors are little-endian: the low bytes come first.
    std::memcpy(static_cast<char *>(o.b_codes) + c * o.b_bytes, &b_code,
                static_cast<size_t>(o.b_bytes));
    o.B[c] = n.B;
    o.M[c] = n.M;
    o.k[c] = n.k;
}

}  // namespace quant_gru
