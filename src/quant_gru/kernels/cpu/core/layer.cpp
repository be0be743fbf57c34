#include "cpu/core/layer.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/core/pack_weights.hpp"

namespace quant_gru {
namespace {

constexpr double kExactDouble = 9007199254740992.;  // 2^53

void find_reciprocal(Quantizer &q) {
    int exponent;
    const float inverse = 1.f / q.scale;
    // The reciprocal is exact for powers of two, if it is a normal number.
    if (std::frexp(q.scale, &exponent) == 0.5f && std::isnormal(inverse)) q.reciprocal = inverse;
}

// Computes reciprocals and real multipliers from the numbers of a plan, and copies its tables.
void complete(Cell &cell, Arena &arena) {
    find_reciprocal(cell.x);
    find_reciprocal(cell.h);
    for (Sum *s : {&cell.z_pre, &cell.r_pre, &cell.rRh, &cell.g_pre, &cell.old_contrib,
                   &cell.new_contrib, &cell.h_new, &cell.zoneout})
        for (int i = 0; i < 2; ++i) s->m[i] = std::ldexp(static_cast<double>(s->M[i]), -s->k);
    for (Table *t : {&cell.z, &cell.r, &cell.g}) copy_segments(*t, arena);
}

bool multipliers_fit_float(const Cell &cell) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.rRh, &cell.g_pre, &cell.old_contrib,
                         &cell.new_contrib, &cell.h_new})
        if (!fits_float(s->m[0]) || !fits_float(s->m[1])) return false;
    return true;
}

// Whether the rounding constant of float32, 1.5 * 2^23, times m is exact. The second function is
// the same for double, with 1.5 * 2^52.
bool scales_rounded(double m) {
    return static_cast<double>(static_cast<float>(1.5 * m)) == 1.5 * m;
}
bool scales_rounded_double(int64_t M) { return M < int64_t{1} << 51; }

// Whether the addends of QG_DOUBLE (rules.inl) have so many bits at most, for all sums.
bool addends_fit(const Cell &cell, int bits) {
    if (cell.rule != QG_DOUBLE) return true;
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.rRh, &cell.g_pre, &cell.old_contrib,
                         &cell.new_contrib, &cell.h_new, &cell.zoneout})
        if (s->present && s->k - s->first > bits) return false;
    return true;
}

// Whether one half, added to the sums of two terms, leaves them exact in float32. In float64 it
// does: tier c counts it.
bool halves_fit(const Cell &cell) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.g_pre, &cell.h_new, &cell.zoneout})
        if (s->present && s->bound + std::ldexp(1, s->k - 1) >= 0x1p24) return false;
    return true;
}

// Whether stretched numbers move only ties of the sums of two terms, and of the products of codes.
// A sum needs two bits more: it moves by one or two units of its last place.
bool sums_stretch(const Cell &cell, int bits, bool (*stretches)(double, int64_t)) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.g_pre, &cell.h_new, &cell.zoneout})
        if (s->present && s->bound >= std::ldexp(1, bits - 2)) return false;
    for (const Sum *s : {&cell.rRh, &cell.old_contrib, &cell.new_contrib})
        if (s->present && !stretches(s->bound, s->M[0])) return false;
    return true;
}

// The bits of float and double, less those of the addends themselves.
constexpr int kFloatAddends = 22, kDoubleAddends = 50;

// Whether lanes of `Powers` compute everything after the matrix products exactly.
bool lanes_of_powers(const Cell &cell) {
    for (const Sum *s : {&cell.z_pre, &cell.r_pre, &cell.g_pre, &cell.h_new})
        if (s->tier != 'a') return false;
    // The kernel scales rounded products by the multiplier of the next sum.
    for (double m : {cell.g_pre.m[1], cell.h_new.m[0], cell.h_new.m[1]})
        if (!scales_rounded(m)) return false;
    for (const Sum *s : {&cell.rRh, &cell.old_contrib, &cell.new_contrib})
        if (!s->present || !is_power(s->m[0])) return false;
    for (const Table *t : {&cell.z, &cell.r, &cell.g})
        if (!t->entries && !t->words) return false;
    // The offset of a table's output, and one minus it, must be exact in float32.
    return multipliers_fit_float(cell) && addends_fit(cell, kFloatAddends) &&
           !cell.zoneout.present && cell.one < int64_t{1} << 22;
}

// The smallest and the largest multiplier of both matrices that is not 0.
std::pair<double, double> multiplier_range(const Matrix &W, const Matrix &R, int H) {
    double least = HUGE_VAL, most = 0;
    for (const Matrix *matrix : {&W, &R})
        for (int c = 0; c < 3 * H; ++c) {
            if (!matrix->M[c]) continue;
            const double m =
                std::ldexp(static_cast<double>(matrix->M[c]), -static_cast<int>(matrix->k[c]));
            least = std::min(least, m);
            most = std::max(most, m);
        }
    return {least, most};
}

}  // namespace

Layer::Layer(const LayerPlan &plan, const std::string &variant)
    : H_(plan.cell.H), C_(plan.W.inputs), W_(plan.W), R_(plan.R), variant_(variant_of(variant)) {
    Cell cell = plan.cell;
    complete(cell, arena_);
    const bool other = cell.rule != QG_HALF_EVEN;
    if (!plan.narrow || (other && !kDirected) || !addends_fit(cell, kDoubleAddends)) {
        static_cast<Cell &>(wide_) = cell;
        repack();
        return;
    }
    if (other) static_cast<Cell &>(wide_) = cell;  // QG_DOUBLE may need the generic kernel
    tabulate(cell.z, cell.z_pre, arena_);
    tabulate(cell.r, cell.r_pre, arena_);
    tabulate(cell.g, cell.g_pre, arena_);
    static_cast<Cell &>(fused_) = cell;
    narrow_ = true;
    float32_ = plan.float32;
    product_ = plan.product;
    arrange();
}

void Layer::repack() {
    if (narrow_) return arrange();
    pack_generic();
}

void Layer::pack_generic() {
    copy_wide(W_, H_, arena_, wide_.W);
    copy_wide(R_, H_, arena_, wide_.R);
}

// Lays weights out for the fastest kernel that supports them.
void Layer::arrange() {
    bool fast = true;
    bool in_float = float32_ && multipliers_fit_float(fused_) && fused_.z.entries &&
                    fused_.r.entries && fused_.g.entries;
    for (const Sum *s : {&fused_.z_pre, &fused_.r_pre, &fused_.g_pre, &fused_.h_new})
        fast = fast && s->tier != 'd';
    // Without fused multiply-add, products with a multiplier must be exact in double.
    bool in_double = true;
    for (const Sum *s : {&fused_.rRh, &fused_.old_contrib, &fused_.new_contrib})
        in_double = in_double && product_ * static_cast<double>(s->M[0]) < kExactDouble;
    const Layout &layout = *variant_.layout;
    if (fused_.rule == QG_DOUBLE) {
        // lanes add the second step's share to one half
        const auto [least, most] = multiplier_range(W_, R_, H_);
        if (least < std::ldexp(1, -kDoubleAddends)) {
            kind_ = Kind::wide;
            return pack_generic();
        }
        fast = fast && most < 0.5;
        in_float = in_float && least >= std::ldexp(1, -kFloatAddends) &&
                   addends_fit(fused_, kFloatAddends);
    }
    Exactness exact{in_float, in_double, layout.powers && !float32_ && lanes_of_powers(fused_)};
    fast = fast && pack_fused(W_, H_, layout, arena_, fused_.W, exact) &&
           pack_fused(R_, H_, layout, arena_, fused_.R, exact);
    in_float = exact.in_float && fused_.R.planes == 1;
    if (fast && (in_float || exact.in_double || layout.fused_multiply_add)) {
        fused_.in_float = in_float;
        fused_.scalable = true;
        for (const Sum *s : {&fused_.z_pre, &fused_.r_pre, &fused_.g_pre, &fused_.h_new})
            for (int i = 0; i < 2; ++i)
                fused_.scalable = fused_.scalable && (in_float ? scales_rounded(s->m[i])
                                                               : scales_rounded_double(s->M[i]));
        fused_.powers = exact.powers;
        fused_.halves = !(in_float || exact.powers) || halves_fit(fused_);
        fused_.stretches = in_float
                               ? exact.stretched_float && sums_stretch(fused_, 24, stretches_float)
                               : !exact.powers && exact.stretched_double &&
                                     sums_stretch(fused_, 53, stretches_double);
        variant_.prepare(fused_, arena_.reuse(fused_.gates, kGatesBytes));
        kind_ = Kind::fused;
        return;
    }
    kind_ = Kind::general;
    static_cast<Cell &>(general_) = fused_;
    bool stretched = sums_stretch(fused_, 53, stretches_double);
    const int64_t bound = std::max(pack_general(W_, H_, general_.x, arena_, general_.W, stretched),
                                   pack_general(R_, H_, general_.h, arena_, general_.R, stretched));
    general_.stretches = stretched;
    general_.small_sums = bound < (int64_t{1} << 31) && general_.W.planes == 1 &&
                          general_.R.planes == 1 && general_.W.flush >= general_.W.pairs &&
                          general_.R.flush >= general_.R.pairs;
    bool fits = multipliers_fit_float(general_);
    for (const Projection *p : {&general_.W, &general_.R})
        for (int c = 0; c < 3 * H_; ++c) fits = fits && fits_float(p->m[c]);
    const bool even = fused_.rule == QG_HALF_EVEN || fused_.rule == QG_FLOOR;
    general_.in_float =
        even && float32_ && general_.small_sums && bound < (int64_t{1} << 24) && fits;
}

const Cell &Layer::cell() const {
    if (kind_ == Kind::fused) return fused_;
    if (kind_ == Kind::general) return general_;
    return wide_;
}

int64_t Layer::workspace(int64_t rows, int64_t T) const {
    if (kind_ == Kind::wide) return workspace_bytes(wide_);
    if (kind_ == Kind::fused) {
        const Layout &layout = *variant_.layout;
        const int64_t words = extends(layout, fused_, rows, T)
                                  ? 2 * (fused_.W.groups * fused_.W.word_stride +
                                         fused_.R.groups * fused_.R.word_stride)
                                  : 0;
        rows = std::min<int64_t>(rows, layout.rows);
        const int64_t operand = layout.operand == Operand::s16 ? 2 : 1;
        auto stride = [&](const Packed &p) {
            return operand * p.planes * cache_lines(static_cast<int64_t>(p.steps) * layout.depth);
        };
        const int64_t both = steps_ahead(T, rows, layout.ahead) * rows;
        const int64_t units = static_cast<int64_t>(fused_.R.groups) * layout.group;
        return words + cache_lines(both * units * 3 * 4) +
               cache_lines(round_up(both, layout.row_block) * stride(fused_.W)) +
               cache_lines(4 * round_up(std::max(H_, C_), 16)) + cache_lines(rows * units * 8) +
               2 * cache_lines(round_up(rows, layout.row_block) * stride(fused_.R));
    }
    const GeneralPlan &p = general_;
    rows = std::min<int64_t>(rows, kRows);
    const int64_t ahead = steps_ahead(T, rows, kAhead);
    return cache_lines(ahead * rows * p.W.tiles * kTile * 8) +
           cache_lines(rows * p.R.tiles * kTile * 8) + cache_lines(rows * H_ * 8) +
           cache_lines(static_cast<int64_t>(H_) * 6 * 8) +
           cache_lines(ahead * rows * 2 * p.W.pairs * 2) + cache_lines(rows * 2 * p.R.pairs * 2) +
           cache_lines(4 * std::max(H_, C_));
}

bool Layer::run(const Job &job) const {
    switch (kind_) {
        case Kind::fused:
            return variant_.fused(fused_, job);
        case Kind::general:
            return variant_.general(general_, job);
        default:
            return run_wide(wide_, job, variant_.wide_sums);
    }
}

double Layer::work() const {
    const double each = kind_ == Kind::fused ? 1 : kind_ == Kind::general ? 3 : 50;
    return 3.0 * H_ * (static_cast<double>(H_) + C_ + 128) * each;
}

}  // namespace quant_gru
