#include "cuda/host/derived_arrays.hpp"

#include <algorithm>
#include <cstdlib>

namespace quant_gru::cuda {
namespace {

// What kernels derive, and what they read for that besides codes.
constexpr Address OperandC::*kArrays[] = {
    &OperandC::m,          &OperandC::gemm,         &OperandC::tiles,
    &OperandC::folded,     &OperandC::folded_bytes, &OperandC::m_float,
    &OperandC::exact_float};
constexpr int64_t OperandC::*kSizes[] = {&OperandC::padded,     &OperandC::planes, &OperandC::fold,
                                         &OperandC::fold_words, &OperandC::reach,  &OperandC::whole,
                                         &OperandC::long_sums};

// Leaves out the arrays of `others`.
void leave_out(const WeightsC &others, WeightsC &from) {
    for (size_t which = 0; which < 2; ++which) {
        for (const auto array : kArrays)
            if (others.operands[which].*array) from.operands[which].*array = 0;
        if (others.columns[which]) from.columns[which] = 0;
    }
}

// The arguments of launches that write arrays and fragments.
using SizedFragments = std::map<std::pair<int64_t, int64_t>, Fragments>;
std::vector<WeightsC> launches_of(const WeightsC &arrays, const SizedFragments &fragments) {
    std::vector<WeightsC> found{arrays};
    for (const auto &[size, f] : fragments) {
        if (found.back().count == kMostFragments) {
            found.push_back(arrays);
            leave_out(arrays, found.back());
        }
        WeightsC &to = found.back();
        to.fragments[to.count++] = {f.weights, f.bias, f.m, size.first, size.second};
    }
    return found;
}

}  // namespace

double added_to_bytes(const CellNumbers &n) {
    const int64_t lo = n.Wx.lo() - n.Wx.zero;
    if (n.rounding != QG_HALF_EVEN) return static_cast<double>(2 * std::llabs(lo) + 1);
    return static_cast<double>(std::llabs(lo % 2 ? lo + 127 : lo + 128));
}

MatrixC row_numbers(const CellNumbers &n, int which) {
    const QuantizerNumbers &out = which ? n.Rh : n.Wx, &q = operand_of(n, which);
    MatrixC c{};
    c.bias_shift = bias_shift(weights_of(n, which).weight_bits, q.bits);
    c.zero = q.zero;
    c.lo = c.code_lo = out.lo() - out.zero;
    c.hi = out.hi() - out.zero;
    return c;
}

GemmWeights gemm_sizes(const CellNumbers &n, int which) {
    const MatrixNumbers &w = weights_of(n, which);
    GemmWeights g{};
    g.planes = planes_of(w.weight_bits);
    g.padded = (std::max<int64_t>(w.inputs, 1) + 15) / 16 * 16;
    // cuBLAS has no kernel for many rows if the number of columns is an odd multiple of 8
    g.columns = ((g.planes == 1 ? 3 * n.H : 6 * n.H + 1) + 15) / 16 * 16;
    return g;
}

DerivedArrays::DerivedArrays(const CellNumbers &numbers, const Form &form,
                             const std::array<StoredMatrix, 2> &stored, Allocate allocate)
    : n_(numbers), form_(form), allocate_(std::move(allocate)) {
    constexpr int kLong = 512;  // of about three times as many features, typical sums exceed int32
    all_.H = n_.H;
    all_.planes_R = form.weight_bytes;
    for (int which = 0; which < 2; ++which) {
        OperandC &o = operand(which);
        const StoredMatrix &given = stored[static_cast<size_t>(which)];
        const QuantizerNumbers &q = operand_of(n_, which);
        const GemmWeights sizes = gemm_sizes(n_, which);
        const int64_t inputs = weights_of(n_, which).inputs;
        const bool two = planes_of(q.bits) == 2;
        o.codes = given.codes;
        o.B = given.bias;
        o.M = given.M;
        o.k = given.k;
        o.kind = static_cast<int64_t>(given.kind);
        o.K = inputs;
        o.padded = sizes.padded;
        o.planes = sizes.planes;
        o.fold = byte_offset(q) - q.zero;
        o.fold_words = o.fold + (two ? 128 : 0);
        o.reach = q.reach();
        o.whole = which ? form.in_int32() : 2 * two;
        o.long_sums = !which && two && inputs > kLong;
        o.added = added_to_bytes(n_);
    }
}

DerivedArrays::DerivedArrays(const DerivedArrays &other, Allocate allocate) : DerivedArrays(other) {
    allocate_ = std::move(allocate);
}

Address DerivedArrays::made(Address &array, int64_t bytes) {
    if (!array) {
        array = allocate_(bytes);
        ++count_;
    }
    return array;
}

MatrixC DerivedArrays::matrix(int which) {
    const OperandC &o = operand(which);
    MatrixC c = row_numbers(n_, which);
    c.codes = o.codes;
    c.bias = o.B;
    c.M = o.M;
    c.k = o.k;
    if (form_.narrow) c.m = multipliers(which);
    c.kind = o.kind;
    return c;
}

MatrixC DerivedArrays::transposed(int which) {
    MatrixC c = matrix(which);
    c.kind = static_cast<int64_t>(Container::i32);
    c.codes = made(all_.columns[which], 12 * all_.H * operand(which).K);
    return c;
}

Address DerivedArrays::multipliers(int which) { return made(operand(which).m, 24 * all_.H); }

Address DerivedArrays::exact(int which) { return made(operand(which).exact_float, 8); }

GemmWeights DerivedArrays::gemm(int which) {
    OperandC &o = operand(which);
    GemmWeights g = gemm_sizes(n_, which);
    g.weights = made(o.gemm, (g.columns + 2) * g.padded);
    g.folded = made(o.folded, 24 * all_.H);
    return g;
}

ByteWeights DerivedArrays::bytes() {
    const GemmWeights g = gemm(0);
    OperandC &o = operand(0);
    return {g.weights, g.folded, made(o.folded_bytes, 12 * all_.H), made(o.m_float, 12 * all_.H),
            g.padded};
}

Address DerivedArrays::tiles() {
    const int64_t tiles = (all_.H + 63) / 64, panels = (operand(0).K + 127) / 128;
    return made(operand(0).tiles, tiles * panels * 3 * 64 * 128);
}

Fragments DerivedArrays::fragments(int64_t features, int64_t units) {
    Fragments &f = fragments_[{features, units}];
    made(f.weights, all_.planes_R * 3 * units * features);
    made(f.bias, 24 * units);
    made(f.m, 24 * units);
    return f;
}

std::vector<WeightsC> DerivedArrays::take_new() {
    if (count_ == written_count_) return {};
    WeightsC arrays = all_;
    leave_out(written_, arrays);
    SizedFragments fragments = fragments_;
    for (const auto &[size, f] : written_fragments_) fragments.erase(size);
    written_ = all_;
    written_fragments_ = fragments_;
    written_count_ = count_;
    return launches_of(arrays, fragments);
}

std::vector<WeightsC> DerivedArrays::arguments() const { return launches_of(all_, fragments_); }

bool DerivedArrays::add_to(WeightsC &update) const {
    const WeightsC first = arguments().front();
    for (size_t which = 0; which < 2; ++which) {
        OperandC &to = update.operands[which];
        for (const auto array : kArrays) to.*array = first.operands[which].*array;
        for (const auto size : kSizes) to.*size = first.operands[which].*size;
        to.added = first.operands[which].added;
    }
    std::copy(std::begin(first.fragments), std::end(first.fragments), update.fragments);
    update.count = first.count;
    update.planes_R = first.planes_R;
    return fragments_.size() <= kMostFragments && !all_.columns[0] && !all_.columns[1];
}

}  // namespace quant_gru::cuda
