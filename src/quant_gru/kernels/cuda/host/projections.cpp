#include "cuda/host/projections.hpp"

#include <algorithm>

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

// Sets the members that describe the result.
template <class Arguments, class Part>
void place(Draft<Arguments> &draft, Part &part, const Cell &cell, const Projected &out) {
    draft.point(part.Wx, out.Wx);
    part.NB = out.size.shape.strip();
    part.tiles = out.size.shape.strips(out.size.N);
    part.groups = out.size.units() / 16;
    part.wide = cell.form().wide_input;
}

// Fills what epilogue.cuh reads.
template <class Arguments>
void requantize(Draft<Arguments> &draft, const Cell &cell, const Projected &out) {
    const ByteWeights w = cell.bytes();
    const MatrixC W = cell.W();
    ProjectedC &p = draft->to;
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
    place(draft, p, cell, out);
    p.lo = W.lo;
    p.hi = W.hi;
    p.code_lo = W.code_lo;
}

}  // namespace

void project_reals(Launches &to, const Cell &cell, const Projected &out, Place nan) {
    Draft<ProjectFewC> p;
    const ByteWeights w = cell.bytes();
    p.point(p->nan, nan);
    p->weights = w.weights;
    p->N = to.N;
    p->C = cell.C();
    p->H = cell.H();
    p->padded = w.padded;
    p->nan_stride = to.flag_stride();
    place(p, p.arguments, cell, out);
    p->division = division_of(cell.numbers().x);
    p->W = cell.W();
    to.read_fours(p, p.arguments);
    Kernel kernel{"projection/reals_few_rows", "project_few", plain_of(cell.numbers())};
    kernel.macros["WIDE"] = cell.x_planes() == 2 ? "1" : "0";
    to.add(kernel, few_grid(to), p);
}

void project_codes(Launches &to, const Cell &cell, const Projected &out, Place codes) {
    Draft<ProjectC> p;
    p->s = to.sequence_of(cell);
    p.point(p->s.x, codes);
    p->W = cell.W();
    place(p, p.arguments, cell, out);
    to.add({"projection/int_mm", "project", plain_of(cell.numbers())}, few_grid(to), p);
}

void project_reals_tiled(Launches &to, Cell &cell, const Projected &out, const RealBlocks &blocks,
                         Place nan) {
    const QuantizerNumbers &x = cell.numbers().x;
    const auto [kernel, grid] = layout_of(blocks, epilogue_of(cell.numbers()), out.size, x);
    to.expect(kernel);
    Draft<ProjectRealsC> p;
    requantize(p, cell, out);
    if (std::holds_alternative<Warpgroups>(blocks)) p->to.weights = cell.tiles();
    p.point(p->nan, nan);
    p->C = cell.C();
    p->nan_stride = to.flag_stride();
    p->parts = std::visit([](const auto &each) { return each.parts; }, blocks);
    p->zero = x.zero - cell.x_offset();
    p->division = division_of(x);
    to.read_fours(p, p.arguments);
    to.add(kernel, grid, p);
}

void project_bytes(Launches &to, const Cell &cell, const Projected &out, const CodeBlocks &blocks,
                   Place bytes, const std::optional<Overlap> &overlap, Place counts) {
    const ProjectionSize &size = out.size;
    const Epilogue epilogue = epilogue_of(cell.numbers());
    if (const auto *tile = std::get_if<Tile>(&blocks)) {
        Draft<ProjectBytesC> p;
        p.point(p->bytes, bytes);
        requantize(p, cell, out);
        const auto [kernel, grid] = tile->layout(size.units(), size.rows(), epilogue);
        to.add(kernel, grid, p);
        return;
    }
    const auto &block = std::get<WeightStationary>(blocks);
    Draft<ProjectPassingC> p;
    p.point(p->bytes, bytes);
    requantize(p, cell, out);
    auto [grid, share] = block.grid(size.units(), size.rows(), size.padded(), size.planes,
                                    to.layers.chip.processors());
    p->share = share;
    if (overlap) {
        grid = overlap->grid(size.units(), size.padded(), size.planes);
        p.point(p->counts, counts);
        p->stretch = overlap->chunk * size.N;
    }
    grid.early = true;  // it loads its weights while the codes are computed
    to.add(block.kernel(epilogue), grid, p);
}

void project_by_products(Launches &to, Cell &cell, const Projected &out, Place bytes) {
    const GemmWeights W = cell.gemm(0);
    const int64_t N = to.N, T = to.T, planes = cell.x_planes();
    const RecurrenceShape &shape = out.size.shape;
    const int64_t strips = shape.strips(N);
    const int64_t step_bytes = 4 * planes * N * W.columns;
    const int64_t most = std::min(T, std::max<int64_t>(1, kMostProduct / step_bytes));
    const int64_t steps = to.form.own_products ? most : T;
    const Place product = to.product_room(steps * step_bytes);
    Grid grid;
    grid.threads = threads_for(out.size.units() * shape.strip());
    for (int64_t first = 0; first < T; first += steps) {
        Draft<ProjectC> p;
        p->s = to.sequence_of(cell);
        p->s.T = std::min(steps, T - first);
        p->W = cell.W();
        p->folded = W.folded;
        p.point(p->product, product);
        p->planes_x = planes;
        p->planes_W = W.planes;
        p->columns = W.columns;
        p->padded_C = W.padded;
        p->x_offset = cell.x_offset();
        const int64_t words =
            first * strips * out.size.units() * shape.strip() * (cell.form().wide_input ? 2 : 1);
        place(p, p.arguments, cell, {out.Wx + 4 * words, out.size});
        to.multiply(cell, 0, bytes + first * N * W.padded, planes * p->s.T * N, p->s.T * N, T * N,
                    product);
        grid.x = static_cast<unsigned>(p->s.T * strips);
        to.add({"projection/int_mm", "finish", plain_of(cell.numbers())}, grid, p);
    }
}

Place project_from_codes(Launches &to, Cell &cell, const RecurrenceShape &shape, Place codes) {
    const Place Wx = to.reserve(4 * shape.projected_words(cell.form(), to.T, to.N));
    const Projected out{Wx, cell.projection(to.T, to.N, shape)};
    const Selection found =
        select_projection(to.layers.chip, out.size, false, std::nullopt, to.policy);
    if (found.method == Projection::codes_few) {
        project_codes(to, cell, out, codes);
        return Wx;
    }
    const QuantizerNumbers &x = cell.numbers().x;
    const int64_t rows = to.T * to.N, padded = padded_features(std::max<int64_t>(cell.C(), 1));
    Place bytes = codes;
    // unsigned codes of 7 bits and fewer are in int8 as well, but lack the offset
    const bool are_bytes = x.container() == Container::i8 && cell.x_offset() == 0;
    if (!are_bytes || padded != cell.C() || !codes.is_aligned()) {
        bytes = to.reserve(cell.x_planes() * rows * padded);
        to.split_codes(x, codes, rows, cell.C(), bytes);
    }
    if (found.codes)
        project_bytes(to, cell, out, *found.codes, bytes, std::nullopt, {});
    else
        project_by_products(to, cell, out, bytes);
    return Wx;
}

}  // namespace quant_gru::cuda
