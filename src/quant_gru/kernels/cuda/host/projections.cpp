#include "cuda/host/projections.hpp"

#include <algorithm>
#include <cmath>

namespace quant_gru::cuda {
namespace {

constexpr int64_t kMostProduct = int64_t{1} << 26;  // bytes of sums at once

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
    p.NB = out.size.shape.strip();
    p.tiles = out.size.shape.strips(out.size.N);
    p.groups = out.size.units() / 16;
    p.wide = cell.form().wide_input;
}

// What epilogue.cuh reads.
ProjectedC requantized(const Cell &cell, const Projected &out) {
    const ByteWeights &w = cell.bytes();
    const MatrixC &W = cell.W();
    ProjectedC p{};
    p.weights = w.weights;
    p.folded = w.folded;
    p.m = W.m;
    p.folded_bytes = w.folded_bytes;
    p.m_float = w.m_float;
    p.exact_float = cell.exact_W();
    p.T = out.size.T;
    p.N = out.size.N;
    p.H = cell.H();
    p.padded = w.padded;
    place(p, cell, out);
    p.lo = W.lo;
    p.hi = W.hi;
    p.code_lo = W.code_lo;
    return p;
}

}  // namespace

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

void project_reals_tiled(Launches &to, Cell &cell, const Projected &out, const RealBlocks &blocks,
                         Address nan) {
    const QuantizerNumbers &x = cell.numbers().x;
    ProjectRealsC p{};
    p.to = requantized(cell, out);
    if (std::holds_alternative<Warpgroups>(blocks)) p.to.weights = cell.tiles();
    p.nan = nan;
    p.step = to.x_step();
    p.next = to.x_next();
    p.C = cell.C();
    p.nan_stride = to.flag_stride();
    p.parts = std::visit([](const auto &each) { return each.parts; }, blocks);
    p.zero = x.zero - cell.x_offset();
    p.division = division_of(x);
    const auto [kernel, grid] = layout_of(blocks, epilogue_of(cell.numbers()), out.size, x);
    to.add(kernel, grid, p);
    to.point(place_of(p, p.real), Given::x);
    if (cell.C() % 4 == 0) to.last().fours_at = place_of(p, p.fours);
}

void project_bytes(Launches &to, const Cell &cell, const Projected &out, const CodeBlocks &blocks,
                   Address bytes, const std::optional<Overlap> &overlap, Address counts) {
    const ProjectionSize &size = out.size;
    const Epilogue epilogue = epilogue_of(cell.numbers());
    if (const auto *tile = std::get_if<Tile>(&blocks)) {
        const auto [kernel, grid] = tile->layout(size.units(), size.rows(), epilogue);
        to.add(kernel, grid, ProjectBytesC{bytes, requantized(cell, out)});
        return;
    }
    const auto &block = std::get<WeightStationary>(blocks);
    ProjectPassingC p{};
    p.bytes = bytes;
    p.to = requantized(cell, out);
    auto [grid, share] = block.grid(size.units(), size.rows(), size.padded(), size.planes,
                                    to.network.device.multiprocessors());
    p.share = share;
    if (overlap) {
        grid = overlap->grid(size.units(), size.padded(), size.planes);
        p.counts = counts;
        p.stretch = overlap->chunk * size.N;
    }
    grid.early = true;  // it loads its weights while the codes are computed
    to.add(block.kernel(epilogue), grid, p);
}

void project_by_products(Launches &to, Cell &cell, const Projected &out, Address bytes) {
    const GemmWeights &W = cell.gemm(0);
    const int64_t N = to.N, T = to.T, planes = cell.x_planes();
    const RecurrenceShape &shape = out.size.shape;
    const int64_t strips = shape.strips(N);
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
    grid.threads = threads_for(out.size.units() * shape.strip());
    for (int64_t first = 0; first < T; first += most) {
        p.s.T = std::min(most, T - first);
        const int64_t words = first * strips * out.size.units() * shape.strip() * (p.wide ? 2 : 1);
        p.Wx = out.Wx + static_cast<Address>(4 * words);
        to.multiply(W, bytes + static_cast<Address>(first * N * W.padded), planes * p.s.T * N,
                    p.s.T * N, T * N, p.product);
        grid.x = static_cast<unsigned>(p.s.T * strips);
        to.add({"projection/int_mm", "finish", kPlain}, grid, p);
    }
}

}  // namespace quant_gru::cuda
