#include "cuda/host/projections.hpp"

#include <algorithm>
#include <cmath>

namespace quant_gru::cuda {
namespace {

constexpr int64_t kFewBlocks = 256, kLargeAtOnce = 3;  // see from_codes.py
constexpr int64_t kStages = 4, kDepth = 64;
constexpr int64_t kFewRows = 64;     // up to which a warp computes each unit from codes
constexpr int64_t kFewestReals = 8;  // the same from real values
constexpr int64_t kMostProduct = int64_t{1} << 26;  // bytes of sums at once

// A tile of projection/codes_tiled.cu: two by two warps of 16 units and 8 `columns` rows.
struct Tile {
    int columns;

    static constexpr int64_t kUnits = 32;
    int64_t rows() const { return 16 * columns; }
    int64_t blocks(int64_t units, int64_t count) const {
        return (units + kUnits - 1) / kUnits * ((count + rows() - 1) / rows());
    }
};

Tile tile_for(int64_t units, int64_t rows, int planes, int64_t processors) {
    if (Tile{4}.blocks(units, rows) < kFewBlocks) return {2};
    // larger tiles read operands less often, but their last wave may leave most of a GPU idle
    const int64_t blocks = Tile{8}.blocks(units, rows), at_once = kLargeAtOnce * processors;
    const int64_t whole = at_once * ((blocks + at_once - 1) / at_once);
    const bool busy = static_cast<double>(blocks) / static_cast<double>(whole) > 0.6;
    return {planes == 1 && busy ? 8 : 4};
}

// A warp for each unit of each row.
Grid few_grid(const Launches &to) {
    Grid grid;
    grid.x = static_cast<unsigned>(to.T * to.N);
    grid.y = static_cast<unsigned>((to.H() + 7) / 8);
    grid.threads = 256;
    return grid;
}

// Sets the fields that describe the result.
template <class Arguments>
void place(Arguments &p, const Cell &cell, const Projected &out) {
    p.Wx = out.Wx;
    p.NB = out.strip;
    p.tiles = out.strips;
    p.groups = out.units / 16;
    p.wide = cell.form().wide_input;
}

}  // namespace

bool is_power(float scale) {
    int exponent;
    return std::frexp(scale, &exponent) == 0.5f;
}

Projection select_projection(const Launches &to, const Cell &cell, const Projected &out,
                             bool real_values) {
    const int64_t rows = to.T * to.N;
    if (real_values && cell.projects_bytes() && divides(cell.numbers().x)) {
        if (rows > kFewestReals && has_real_blocks(to, cell, out)) return Projection::reals_tiled;
        if (rows <= kFewRows) return Projection::reals_few;
    }
    if (rows <= kFewRows) return Projection::codes_few;
    if (cell.projects_bytes()) return Projection::bytes;
    return Cell::sums_fit(cell.C()) ? Projection::products : Projection::codes_few;
}

ProjectedC epilogue_of(const Launches &to, const Cell &cell, const Projected &out) {
    const ByteWeights &w = cell.bytes();
    const MatrixC &W = cell.W();
    ProjectedC p{};
    p.weights = w.weights;
    p.folded = w.folded;
    p.m = W.m;
    p.folded_bytes = w.folded_bytes;
    p.m_float = w.m_float;
    p.exact_float = cell.exact_W();
    p.T = to.T;
    p.N = to.N;
    p.H = cell.H();
    p.padded = w.padded;
    place(p, cell, out);
    p.lo = W.lo;
    p.hi = W.hi;
    p.code_lo = W.code_lo;
    return p;
}

Macros epilogue_macros(const Cell &cell) {
    const int planes = cell.x_planes();
    const int64_t range = cell.W().hi - cell.W().lo;
    const int codes = !cell.form().wide_input         ? range == 255
                      : planes == 2 && range == 65535 ? 3
                                                      : 2;
    const bool powers = is_power(cell.numbers().x.scale) && is_power(cell.numbers().Wx.scale);
    Macros macros = kPlain;
    macros["PLANES"] = std::to_string(planes);
    macros["CODES"] = std::to_string(codes);
    macros["POWERS"] = powers ? "1" : "0";
    macros["LONG"] = planes == 2 && cell.C() > 512 ? "1" : "0";
    return macros;
}

bool divides(const QuantizerNumbers &x) {
    return std::ldexp(1.f, -90) <= x.scale && x.scale <= std::ldexp(1.f, 90);
}

DivisionC division_of(const QuantizerNumbers &x) {
    // float64 has over twice the bits of float32, so double rounding equals a single rounding
    const double scale = x.scale;
    return {x.scale, static_cast<float>(1 / scale),
            static_cast<float>(static_cast<double>(x.lo() - x.zero) * scale),
            static_cast<float>(static_cast<double>(x.hi() - x.zero) * scale), is_power(x.scale)};
}

void project_reals(Launches &to, const Cell &cell, const Projected &out, Address nan) {
    ProjectFewC p{};
    p.nan = nan;
    p.weights = cell.bytes().weights;
    p.step = to.x_step();
    p.next = to.x_next();
    p.N = to.N;
    p.C = cell.C();
    p.H = cell.H();
    p.padded = cell.bytes().padded;
    p.nan_stride = to.flag_stride();
    place(p, cell, out);
    p.division = division_of(cell.numbers().x);
    p.W = cell.W();
    Kernel kernel{"projection/reals_few_rows", "project_few", kPlain};
    kernel.macros["WIDE"] = cell.x_planes() == 2 ? "1" : "0";
    to.add(kernel, few_grid(to), p);
    to.point(place_of(p, p.real), Given::x);
    if (cell.C() % 4 == 0) to.last().fours_at = place_of(p, p.fours);
}

void project_codes(Launches &to, const Cell &cell, const Projected &out, Address codes) {
    ProjectC p{};
    p.s = to.sequence_of(cell);
    p.s.x = codes;
    p.W = cell.W();
    place(p, cell, out);
    to.add({"projection/int_mm", "project", kPlain}, few_grid(to), p);
}

void project_bytes(Launches &to, const Cell &cell, const Projected &out, Address bytes) {
    const int64_t rows = to.T * out.strips * out.strip;
    const Tile tile =
        tile_for(out.units, rows, cell.x_planes(), to.network.device.multiprocessors());
    const ProjectBytesC p{bytes, epilogue_of(to, cell, out)};
    Kernel kernel{"projection/codes_tiled", "project_bytes", epilogue_macros(cell)};
    kernel.macros["UNIT_WARPS"] = kernel.macros["ROW_WARPS"] = "2";
    kernel.macros["COLUMNS"] = std::to_string(tile.columns);
    kernel.macros["STAGES"] = std::to_string(kStages);
    Grid grid;
    grid.x = static_cast<unsigned>(tile.blocks(out.units, rows));
    grid.threads = 128;
    grid.shared_bytes = static_cast<unsigned>(kStages * kDepth * (3 * Tile::kUnits + tile.rows()));
    to.add(kernel, grid, p);
}

void project_by_products(Launches &to, Cell &cell, const Projected &out, Address bytes) {
    const GemmWeights &W = cell.gemm(0);
    const int64_t N = to.N, T = to.T, planes = cell.x_planes();
    ProjectC p{};
    p.s = to.sequence_of(cell);
    p.W = cell.W();
    p.folded = W.folded;
    p.planes_x = planes;
    p.planes_W = W.planes;
    p.columns = W.columns;
    p.padded_C = W.padded;
    p.x_offset = cell.x_offset();
    place(p, cell, out);
    const int64_t step_bytes = 4 * planes * N * W.columns;
    const int64_t most = std::min(T, std::max<int64_t>(1, kMostProduct / step_bytes));
    p.product = to.reserve(most * step_bytes);
    Grid grid;
    grid.threads = threads_for(out.units * out.strip);
    for (int64_t first = 0; first < T; first += most) {
        p.s.T = std::min(most, T - first);
        const int64_t words = first * out.strips * out.units * out.strip * (p.wide ? 2 : 1);
        p.Wx = out.Wx + static_cast<Address>(4 * words);
        to.multiply(W, bytes + static_cast<Address>(first * N * W.padded), planes * p.s.T * N,
                    p.s.T * N, T * N, p.product);
        grid.x = static_cast<unsigned>(p.s.T * out.strips);
        to.add({"projection/int_mm", "finish", kPlain}, grid, p);
    }
}

}  // namespace quant_gru::cuda
