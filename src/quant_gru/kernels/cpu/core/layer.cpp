#include "cpu/core/layer.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "cpu/core/threads.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

template <class T>
T field(const nb::dict &d, const char *name) {
    return nb::cast<T>(d[name]);
}

template <class T>
const T *address(const nb::dict &d, const char *name) {
    return reinterpret_cast<const T *>(field<uintptr_t>(d, name));
}

Container container_of(const std::string &name) {
    if (name == "int8") return Container::i8;
    if (name == "uint8") return Container::u8;
    if (name == "int16") return Container::i16;
    if (name == "int32") return Container::i32;
    if (name == "int64") return Container::i64;
    throw std::invalid_argument("Expected an integer container, got " + name);
}

Border border_of(const nb::dict &d) {
    Border b;
    b.scale = static_cast<float>(field<double>(d, "scale"));
    int exponent;
    const float inverse = 1.f / b.scale;
    // exact for powers of two whose reciprocal is normal, too
    if (std::frexp(b.scale, &exponent) == 0.5f && std::isnormal(inverse)) b.reciprocal = inverse;
    const int64_t zero = field<int64_t>(d, "zero");
    b.zero = static_cast<int32_t>(zero);
    b.lo = static_cast<int32_t>(field<int64_t>(d, "lo") - zero);
    b.hi = static_cast<int32_t>(field<int64_t>(d, "hi") - zero);
    b.container = container_of(field<std::string>(d, "container"));
    return b;
}

Sum sum_of(const nb::dict &sums, const char *name) {
    Sum s;
    if (!sums.contains(name)) return s;
    const nb::dict d = nb::cast<nb::dict>(sums[name]);
    const auto M = field<std::vector<int64_t>>(d, "M");
    s.present = 1;
    s.tier = field<std::string>(d, "tier")[0];
    s.k = field<int>(d, "k");
    s.lo = field<int64_t>(d, "lo");
    s.hi = field<int64_t>(d, "hi");
    for (size_t i = 0; i < M.size() && i < 2; ++i) {
        s.M[i] = M[i];
        s.m[i] = std::ldexp(static_cast<double>(M[i]), -s.k);
    }
    return s;
}

constexpr double kExactDouble = 9007199254740992.;  // 2^53

int64_t size_of(int64_t v) { return v < 0 ? -v : v; }

bool fits_float(double m) { return m == 0 || (m > 1e-20 && m < 1e20); }

bool fits_float(const Cell &cell) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.rRh, &cell.g_pre, &cell.old_contrib,
                         &cell.new_contrib, &cell.h_new})
        if (!fits_float(s->m[0]) || !fits_float(s->m[1])) return false;
    return true;
}

// Lets packing clamp a sum that goes into a table, where that gives the same.
void saturate(Table &t, const Sum &s) {
    // sums of codes of up to 17 bits then fit 32
    constexpr double kMost = 4096;
    t.saturates = t.bytes && t.pre_hi - t.pre_lo == 255 && s.lo == t.pre_lo && s.hi == t.pre_hi &&
                  s.m[0] + s.m[1] < kMost;
    t.lift = static_cast<int32_t>(static_cast<uint32_t>(-t.pre_lo & 0xffff) * 0x10001u);
    t.place = static_cast<int32_t>(static_cast<uint32_t>(t.pre_lo & 0xff) * 0x1010101u);
}

bool is_power(double m) {
    int exponent;
    return std::frexp(m, &exponent) == 0.5;
}

// Whether what rounds a float can be scaled by a multiplier exactly.
bool scales_rounded(double m) {
    return static_cast<double>(static_cast<float>(1.5 * m)) == 1.5 * m;
}

// Whether lanes of `Powers` hold what comes after the matrix products.
bool lanes_of_powers(const Cell &cell) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.g_pre, &cell.h_new})
        if (s->tier != 'a') return false;
    // rounded products are scaled by the next sum's multiplier
    for (double m : {cell.g_pre.m[1], cell.h_new.m[0], cell.h_new.m[1]})
        if (!scales_rounded(m)) return false;
    for (const Sum *s : {&cell.rRh, &cell.old_contrib, &cell.new_contrib})
        if (!s->present || !is_power(s->m[0])) return false;
    for (const Table *t : {&cell.z, &cell.r, &cell.g})
        if (!t->entries && !t->words) return false;
    // what a table's output lacks, and one less it, are exact
    return fits_float(cell) && !cell.zoneout.present && cell.one < int64_t{1} << 22;
}

int64_t lines(int64_t bytes) { return round_up(bytes, 64); }

Matrix matrix_of(const nb::dict &d) {
    Matrix m;
    m.codes = address<void>(d, "codes");
    m.kind = container_of(field<std::string>(d, "kind"));
    m.bias = address<int64_t>(d, "bias");
    m.M = address<int64_t>(d, "M");
    m.k = address<int64_t>(d, "k");
    m.lo = field<int64_t>(d, "lo");
    m.hi = field<int64_t>(d, "hi");
    m.zero = field<int64_t>(d, "zero");
    m.reach = field<int64_t>(d, "reach");  // largest |code - zero point|
    m.weight_bits = field<int>(d, "weight_bits");
    m.operand_bits = field<int>(d, "operand_bits");
    m.operand_signed = field<bool>(d, "operand_signed");
    return m;
}

// Calls `f` with the codes of a row.
template <class F>
void with_row(const Matrix &m, int64_t start, F f) {
    switch (m.kind) {
        case Container::i8:
            f(static_cast<const int8_t *>(m.codes) + start);
            break;
        case Container::i16:
            f(static_cast<const int16_t *>(m.codes) + start);
            break;
        default:
            f(static_cast<const int32_t *>(m.codes) + start);
    }
}

// Sum and sum of magnitudes.
template <class Code>
void add_up(const Code *row, int inputs, int64_t &total, int64_t &magnitude) {
    constexpr int kBlock = 1 << 14;  // of 2^15 at most: sums fit 32 bits
    for (int first = 0; first < inputs; first += kBlock) {
        const int end = std::min(inputs, first + kBlock);
        int32_t sum = 0, size = 0;
        for (int i = first; i < end; ++i) {
            const int32_t code = row[i];
            sum += code;
            size += code < 0 ? -code : code;
        }
        total += sum;
        magnitude += size;
    }
}

// Codes of a row to every `stride`-th piece of `kDepth` bytes.
template <int kDepth>
void spread(const int8_t *row, int inputs, int64_t stride, int8_t *to) {
    int i = 0;
    for (; i + kDepth <= inputs; i += kDepth, to += stride) std::memcpy(to, row + i, kDepth);
    for (; i < inputs; ++i) *to++ = row[i];
}

void spread(const int8_t *row, int inputs, int depth, int64_t stride, int8_t *to) {
    switch (depth) {
        case 2:
            return spread<2>(row, inputs, stride, to);
        case 4:
            return spread<4>(row, inputs, stride, to);
        default:
            for (int i = 0; i < inputs; ++i) to[i / depth * stride + i % depth] = row[i];
    }
}

}  // namespace

Layer::Layer(const nb::dict &d, const std::string &variant) : variant_(variant_of(variant)) {
    H_ = field<int>(d, "H");
    C_ = field<int>(d, "C");
    const nb::dict W = nb::cast<nb::dict>(d["W"]), R = nb::cast<nb::dict>(d["R"]);
    if (!field<bool>(d, "narrow")) {
        fill(wide_, d);
        keep(W, wide_.W, C_);
        keep(R, wide_.R, H_);
        return;
    }
    fill(fused_, d);
    for (Table *t : {&fused_.z, &fused_.r, &fused_.g}) prepare(*t);
    saturate(fused_.z, fused_.z_pre);
    saturate(fused_.r, fused_.r_pre);
    saturate(fused_.g, fused_.g_pre);
    float32_ = field<bool>(d, "float32");
    product_ = field<double>(d, "product");
    W_ = matrix_of(W);
    R_ = matrix_of(R);
    arrange();
}

void Layer::repack() {
    if (kind_ != Kind::wide) arrange();
}

// Lays weights out for the fastest kernel that runs them.
void Layer::arrange() {
    bool fast = true;
    bool in_float =
        float32_ && fits_float(fused_) && fused_.z.entries && fused_.r.entries && fused_.g.entries;
    for (const Sum *s : {&fused_.z_pre, &fused_.r_pre, &fused_.g_pre, &fused_.h_new})
        fast = fast && s->tier != 'd';
    // without fused multiply-add, products with a multiplier have to be exact in double
    bool exact = true;
    for (const Sum *s : {&fused_.rRh, &fused_.old_contrib, &fused_.new_contrib})
        exact = exact && product_ * static_cast<double>(s->M[0]) < kExactDouble;
    bool powers = variant_.layout->powers && !float32_ && lanes_of_powers(fused_);
    fast = fast && pack(W_, fused_.W, C_, in_float, exact, powers) &&
           pack(R_, fused_.R, H_, in_float, exact, powers);
    in_float = in_float && fused_.R.planes == 1;
    if (fast && (in_float || exact || variant_.layout->fused_multiply_add)) {
        fused_.in_float = in_float;
        fused_.scalable = true;
        for (const Sum *s : {&fused_.z_pre, &fused_.r_pre, &fused_.g_pre, &fused_.h_new})
            for (double m : s->m)
                fused_.scalable = fused_.scalable && (!in_float || scales_rounded(m));
        fused_.powers = powers;
        kind_ = Kind::fused;
        return;
    }
    kind_ = Kind::general;
    static_cast<Cell &>(general_) = fused_;
    int64_t bound = 0;
    pack_general(W_, general_.x, general_.W, C_, bound);
    pack_general(R_, general_.h, general_.R, H_, bound);
    general_.small_sums = bound < (int64_t{1} << 31) && general_.W.planes == 1 &&
                          general_.R.planes == 1 && general_.W.flush >= general_.W.pairs &&
                          general_.R.flush >= general_.R.pairs;
    bool fits = fits_float(general_);
    for (const Projection *p : {&general_.W, &general_.R})
        for (int c = 0; c < 3 * H_; ++c) fits = fits && fits_float(p->m[c]);
    general_.in_float = float32_ && general_.small_sums && bound < (int64_t{1} << 24) && fits;
}

const Cell &Layer::cell() const {
    if (kind_ == Kind::fused) return fused_;
    if (kind_ == Kind::general) return general_;
    return wide_;
}

void Layer::fill(Cell &cell, const nb::dict &d) {
    const nb::dict sums = nb::cast<nb::dict>(d["sums"]);
    cell.H = H_;
    cell.x = border_of(nb::cast<nb::dict>(d["x"]));
    cell.h = border_of(nb::cast<nb::dict>(d["h"]));
    cell.one = field<int64_t>(d, "one");
    cell.z_pre = sum_of(sums, "gate.z_pre");
    cell.r_pre = sum_of(sums, "gate.r_pre");
    cell.rRh = sum_of(sums, "op.rRh");
    cell.g_pre = sum_of(sums, "gate.g_pre");
    cell.old_contrib = sum_of(sums, "op.old_contrib");
    cell.new_contrib = sum_of(sums, "op.new_contrib");
    cell.h_new = sum_of(sums, "output.h");
    cell.zoneout = sum_of(sums, "zoneout");
    table(d, "gate.z_out", cell.z);
    table(d, "gate.r_out", cell.r);
    table(d, "gate.g_out", cell.g);
}

void Layer::table(const nb::dict &plan, const char *name, Table &t) {
    const nb::dict d = nb::cast<nb::dict>(nb::cast<nb::dict>(plan["tables"])[name]);
    t.segments = field<int>(d, "segments");
    t.degree = field<int>(d, "degree");
    t.shift = field<int>(d, "shift");
    t.segment_shift = field<int>(d, "segment_shift");
    t.last = field<int64_t>(d, "last");
    t.pre_zero = field<int64_t>(d, "pre_zero");
    t.pre_lo = field<int64_t>(d, "pre_lo");
    t.pre_hi = field<int64_t>(d, "pre_hi");
    t.lo = field<int64_t>(d, "lo");
    t.hi = field<int64_t>(d, "hi");
    t.bounds = arena_.copy(address<int64_t>(d, "bounds"), t.segments);
    t.coefficients = arena_.copy(address<int64_t>(d, "coefficients"),
                                 static_cast<size_t>(t.segments) * (t.degree + 1));
    t.first = t.bounds[0];
}

// Gives a table a form that lanes can read.
void Layer::prepare(Table &t) {
    constexpr int64_t kEntries = 4096;
    const int64_t codes = t.pre_hi - t.pre_lo + 1;
    std::vector<int32_t> outputs(static_cast<size_t>(codes));
    int segment = 0;
    for (int64_t i = 0; i < codes; ++i) {
        const int64_t q = qg_clamp(t.pre_lo + i + t.pre_zero, t.first, t.last);
        while (segment + 1 < t.segments && t.bounds[segment + 1] <= q) ++segment;
        outputs[static_cast<size_t>(i)] = static_cast<int32_t>(polynomial(t, segment, q));
    }
    const auto [least, most] = std::minmax_element(outputs.begin(), outputs.end());
    if (codes > kEntries) {
        uint16_t *words = arena_.allocate<uint16_t>(static_cast<size_t>(codes) + 2);
        for (int64_t i = 0; i < codes; ++i)
            words[i] = static_cast<uint16_t>(outputs[static_cast<size_t>(i)] - *least);
        t.words = words;
        t.word_base = *least;
        t.even_lo = static_cast<int32_t>(t.pre_lo & -2);
        return;
    }
    // inputs that differ stay different modulo a power of two that is no less than their number
    int64_t size = 256;
    while (size < codes) size *= 2;
    float *entries = arena_.allocate<float>(static_cast<size_t>(size));
    uint8_t *bytes = size == 256 && *most - *least < 256 ? arena_.allocate<uint8_t>(256) : nullptr;
    for (int64_t i = 0; i < codes; ++i) {
        const int64_t at = (t.pre_lo + i) & (size - 1);
        const int32_t y = outputs[static_cast<size_t>(i)];
        entries[at] = static_cast<float>(y);
        if (bytes) bytes[at] = static_cast<uint8_t>(y - *least);
    }
    t.entries = entries;
    t.mask = static_cast<int32_t>(size - 1);
    t.bytes = bytes;
    if (bytes) {
        uint8_t *steps = arena_.allocate<uint8_t>(256);
        for (int i = 0; i < 256; ++i)
            steps[i] = static_cast<uint8_t>(i % 128 < 16 ? bytes[i] : bytes[i] ^ bytes[i - 16]);
        t.steps = steps;
    }
    t.base = static_cast<float>(*least);
}

// Lays weights out for the fused kernel; returns whether they, and the sums, fit it.
bool Layer::pack(const Matrix &from, Packed &p, int inputs, bool &in_float, bool &exact,
                 bool &powers) {
    if (from.kind != Container::i8) return false;
    const Layout &layout = *variant_.layout;
    const int group = layout.group, depth = layout.depth;
    const bool wide_operand = from.operand_bits > 8, is_signed = from.operand_signed;
    p.inputs = inputs;
    p.steps = (inputs + depth - 1) / depth;
    p.groups = (H_ + group - 1) / group;
    p.planes = wide_operand && layout.operand != Operand::s16 ? 2 : 1;
    if (layout.operand == Operand::u8)
        p.offset = is_signed ? (wide_operand ? -32768 : -128) : 0;
    else if (layout.operand == Operand::s8)
        p.offset = wide_operand ? (is_signed ? 128 : 32896) : (is_signed ? 0 : 128);
    else
        p.offset = wide_operand && !is_signed ? 32768 : 0;
    p.lo = static_cast<double>(from.lo);
    p.hi = static_cast<double>(from.hi);
    // an odd number of cache lines, so that groups do not share their sets
    p.group_stride = lines(round_up(p.steps, layout.step_block) * depth * 3 * group);
    if (p.group_stride / 64 % 2 == 0) p.group_stride += 64;
    const size_t channels = static_cast<size_t>(p.groups) * 3 * group;
    auto *w = arena_.reuse(p.w, static_cast<size_t>(p.groups * p.group_stride));
    auto *bias = arena_.reuse(p.bias, channels);
    auto *m = arena_.reuse(p.m, channels);
    auto *m_float = arena_.reuse(p.m_float, channels);
    auto *rounding = powers ? arena_.reuse(p.rounding, 3 * channels) : nullptr;
    for (int gate = 0; gate < 3; ++gate) {
        for (int unit = 0; unit < H_; ++unit) {
            const int c = gate * H_ + unit, place = unit % group;
            int8_t *to = w + unit / group * p.group_stride + (gate * group + place) * depth;
            int64_t total = 0, magnitude = 0;
            const auto *row =
                static_cast<const int8_t *>(from.codes) + static_cast<int64_t>(c) * inputs;
            spread(row, inputs, depth, 3 * group * depth, to);
            add_up(row, inputs, total, magnitude);
            // the true sum decides; what leads to it may wrap around
            const int64_t bound = magnitude * from.reach + size_of(from.bias[c]);
            if (bound >= int64_t{1} << 31) return false;
            in_float = in_float && bound < int64_t{1} << 24;
            exact =
                exact && static_cast<double>(bound) * static_cast<double>(from.M[c]) < kExactDouble;
            const size_t at = static_cast<size_t>((unit / group * 3 + gate) * group + place);
            const uint64_t folded =
                static_cast<uint64_t>(from.bias[c]) +
                static_cast<uint64_t>(p.offset - from.zero) * static_cast<uint64_t>(total);
            const uint32_t low = static_cast<uint32_t>(folded);
            std::memcpy(bias + at, &low, sizeof low);
            m[at] = std::ldexp(static_cast<double>(from.M[c]), static_cast<int>(-from.k[c]));
            in_float = in_float && fits_float(m[at]);
            m_float[at] = static_cast<float>(m[at]);
            if (!powers) continue;
            // half of 2^s is added before a shift: neither may leave 32 bits
            const int s = -std::ilogb(m[at]);
            powers = is_power(m[at]) && s >= 1 && s <= 30 &&
                     bound + (int64_t{1} << (s - 1)) < int64_t{1} << 31;
            if (!powers) continue;
            int32_t *numbers = rounding + (unit / group * 3 + gate) * 3 * group + place;
            numbers[0] = s;
            numbers[group] = 1 << (s - 1);
            numbers[2 * group] = (1 << s) - 1;
        }
    }
    return true;
}

void Layer::pack_general(const Matrix &from, const Border &operand, Projection &p, int inputs,
                         int64_t &bound) {
    const int channels = 3 * H_;
    p.inputs = inputs;
    p.pairs = (inputs + 1) / 2;
    p.tiles = (channels + kTile - 1) / kTile;
    const bool wide_weights = from.weight_bits > 8, wide_operand = from.operand_bits > 8;
    p.planes = wide_weights ? 2 : 1;
    // |product| of a pair: 2^8 (16: a low plane has 9 bits) times 2^8 or 2^15
    p.flush = (wide_weights ? 64 : 128) * (wide_operand ? 1 : 128);
    // 16 unsigned bits are kept less 2^15, so that they fit int16
    p.offset = operand.zero + operand.hi > 32767 ? 1 << 15 : 0;
    p.lo = static_cast<double>(from.lo);
    p.hi = static_cast<double>(from.hi);
    const size_t padded = static_cast<size_t>(p.tiles) * kTile;
    const size_t size = padded * 2 * p.pairs;
    int16_t *planes[2] = {arena_.reuse(p.w[0], size), nullptr};
    if (p.planes == 2) planes[1] = arena_.reuse(p.w[1], size);
    auto *bias = arena_.reuse(p.bias, padded);
    auto *real_bias = arena_.reuse(p.real_bias, padded);
    auto *m = arena_.reuse(p.m, padded);
    auto *m_float = arena_.reuse(p.m_float, padded);
    int64_t largest = 0;
    for (int c = 0; c < channels; ++c) {
        int16_t *to[2];
        const size_t tile = static_cast<size_t>(c / kTile) * p.pairs * 2 * kTile;
        for (int plane = 0; plane < p.planes; ++plane)
            to[plane] = planes[plane] + tile + 2 * (c % kTile);
        int64_t total = 0, magnitude = 0;
        with_row(from, static_cast<int64_t>(c) * inputs, [&](auto *row) {
            for (int i = 0; i < inputs; ++i) {
                const size_t at = static_cast<size_t>(i / 2) * 2 * kTile + i % 2;
                if (p.planes == 2) {
                    to[0][at] = static_cast<int16_t>(row[i] >> 8);
                    to[1][at] = static_cast<int16_t>(row[i] & 255);
                } else {
                    to[0][at] = static_cast<int16_t>(row[i]);
                }
            }
            add_up(row, inputs, total, magnitude);
        });
        bias[c] = from.bias[c] + (p.offset - from.zero) * total;
        real_bias[c] = static_cast<double>(bias[c]);
        // of the true sum, and of the sum before the bias is added
        const int64_t reach = from.reach + size_of(p.offset - from.zero);
        const int64_t most = magnitude * reach + size_of(from.bias[c]) + size_of(bias[c]);
        bound = most > bound ? most : bound;
        // of parts of the sum, too: planes are less than 256 off their share of a weight
        largest = std::max(largest, most + 256 * reach * inputs);
        m[c] = std::ldexp(static_cast<double>(from.M[c]), static_cast<int>(-from.k[c]));
        m_float[c] = static_cast<float>(m[c]);
    }
    p.exact = largest < (int64_t{1} << 53);
}

void Layer::keep(const nb::dict &d, WideProjection &p, int inputs) {
    const size_t channels = 3 * static_cast<size_t>(H_);
    p.inputs = inputs;
    p.w = arena_.copy(address<int32_t>(d, "codes"), channels * inputs);
    p.bias = arena_.copy(address<int64_t>(d, "bias"), channels);
    p.bias_shift = field<int>(d, "bias_shift");
    p.M = arena_.copy(address<int64_t>(d, "M"), channels);
    p.k = arena_.copy(address<int64_t>(d, "k"), channels);
    p.lo = field<int64_t>(d, "lo");
    p.hi = field<int64_t>(d, "hi");
    p.zero = field<int64_t>(d, "zero");
}

int64_t Layer::workspace(int64_t rows, int64_t T) const {
    if (kind_ == Kind::wide) return workspace_bytes(wide_);
    if (kind_ == Kind::fused) {
        const Layout &layout = *variant_.layout;
        const int64_t words = extends(layout, fused_, rows, T)
                                  ? 2 * (fused_.W.groups * fused_.W.group_stride +
                                         fused_.R.groups * fused_.R.group_stride)
                                  : 0;
        rows = std::min<int64_t>(rows, layout.rows);
        const int64_t operand = layout.operand == Operand::s16 ? 2 : 1;
        auto stride = [&](const Packed &p) {
            return operand * p.planes * lines(static_cast<int64_t>(p.steps) * layout.depth);
        };
        const int64_t both = steps_ahead(T, rows, layout.ahead) * rows;
        const int64_t units = static_cast<int64_t>(fused_.R.groups) * layout.group;
        return words + lines(both * units * 3 * 4) +
               lines(round_up(both, layout.row_block) * stride(fused_.W)) +
               lines(4 * round_up(std::max(H_, C_), 16)) + lines(rows * units * 8) +
               2 * lines(round_up(rows, layout.row_block) * stride(fused_.R));
    }
    const GeneralPlan &p = general_;
    rows = std::min<int64_t>(rows, kRows);
    const int64_t ahead = steps_ahead(T, rows, kAhead);
    return lines(ahead * rows * p.W.tiles * kTile * 8) + lines(rows * p.R.tiles * kTile * 8) +
           lines(rows * H_ * 8) + lines(static_cast<int64_t>(H_) * 6 * 8) +
           lines(ahead * rows * 2 * p.W.pairs * 2) + lines(rows * 2 * p.R.pairs * 2) +
           lines(4 * std::max(H_, C_));
}

bool Layer::run(const Job &job) const {
    switch (kind_) {
        case Kind::fused:
            return variant_.fused(fused_, job);
        case Kind::general:
            return variant_.general(general_, job);
        default:
            run_wide(wide_, job);
            return false;
    }
}

double Layer::work() const {
    const double each = kind_ == Kind::fused ? 1 : kind_ == Kind::general ? 3 : 50;
    return 3.0 * H_ * (static_cast<double>(H_) + C_ + 128) * each;
}

bool run_tasks(const std::vector<Task> &tasks, int threads, Scratch &scratch) {
    // a thread pays where it has a few hundred microseconds of work
    const double pays = 2e7 * thread_price;
    double all = 0;
    int64_t most = 0;
    for (const Task &task : tasks) {
        const Job &job = task.job;
        all += task.layer->work() * static_cast<double>(job.N) * static_cast<double>(job.T);
        most = std::max(most, task.layer->workspace(job.N, job.T));
    }
    if (threads <= 1 || all <= pays) {
        Scratch::Lease lease(scratch, static_cast<size_t>(most));
        bool nan = false;
        for (const Task &task : tasks) {
            Job job = task.job;
            job.first_row = 0;
            job.end_row = job.N;
            job.workspace = lease.data;
            nan = task.layer->run(job) || nan;
        }
        return nan;
    }
    std::vector<Task> parts;
    for (const Task &task : tasks) {
        const int64_t N = task.job.N;
        const double work = task.layer->work() * static_cast<double>(N) *
                            static_cast<double>(std::max<int64_t>(task.job.T, 1));
        int64_t count = threads / static_cast<int>(tasks.size());
        count = std::min({count, N, static_cast<int64_t>(std::min(work / pays, 1e6))});
        count = std::max<int64_t>(count, 1);
        for (int64_t i = 0; i < count; ++i) {
            parts.push_back(task);
            parts.back().job.first_row = N * i / count;
            parts.back().job.end_row = N * (i + 1) / count;
        }
    }
    int64_t bytes = 0;
    for (const Task &part : parts)
        bytes += lines(part.layer->workspace(part.job.end_row - part.job.first_row, part.job.T));
    Scratch::Lease lease(scratch, static_cast<size_t>(bytes));
    char *space = static_cast<char *>(lease.data);
    for (Task &part : parts) {
        part.job.workspace = space;
        space += lines(part.layer->workspace(part.job.end_row - part.job.first_row, part.job.T));
    }
    std::atomic<bool> nan{false};
    auto run = [&](size_t i) {
        if (parts[i].layer->run(parts[i].job)) nan = true;
    };
    std::vector<std::thread> others;
    size_t started = 1;
    others.reserve(parts.size());
    try {
        for (; started < parts.size(); ++started) others.emplace_back(run, started);
    } catch (const std::system_error &) {
        // no more threads to be had: this one does the rest
    }
    threads_started += static_cast<int64_t>(started) - 1;
    run(0);
    for (size_t i = started; i < parts.size(); ++i) run(i);
    for (std::thread &other : others) other.join();
    return nan;
}

}  // namespace quant_gru
