// Recurrences step by step, for weights that do not fit registers, and products of bytes.
#include "cuda/host/projections.hpp"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kTileUnits = 32, kTileRows = 32, kTileBytes = 4 * 64 * (3 * 32 + 32);

struct ProductC {
    Address rows, weights, product;
    int64_t count, chunk, stride, padded, columns, third;
};

template <class Real>
void add_all_steps(Launches &to, Cell &cell, const SequenceC &s, Address Wx, int64_t units) {
    const GemmWeights &R = cell.gemm(1);
    const int planes = cell.form().state_bytes;
    StepC<Real> p{};
    p.s = s;
    p.m = cell.multipliers_R();
    p.folded = R.folded;
    p.product = to.reserve(4 * planes * to.N * R.columns);
    p.bytes = to.reserve(planes * to.N * R.padded);
    p.Wx = Wx;
    p.planes_h = planes;
    p.planes_R = R.planes;
    p.columns = R.columns;
    p.padded_H = R.padded;
    p.groups = units / 16;
    p.wide = cell.form().wide_input;
    p.before = -1;
    p.cell = cell.gates<Real>();
    // the split also writes the padding, which steps leave alone
    to.split_codes(cell.numbers().h, s.h0, to.N, to.H(), p.bytes);
    const Form &form = cell.form();
    Kernel kernel{
        "recurrence/per_step", "step", {{"REAL", sizeof(Real) == 4 ? "float" : "double"}}};
    kernel.macros["QG_WORDS"] = std::to_string(form.words);
    kernel.macros.merge(form.products());
    Grid grid;
    grid.x = static_cast<unsigned>(to.N);
    grid.y = static_cast<unsigned>((to.H() + 255) / 256);
    grid.threads = 256;
    for (int64_t i = 0; i < to.T; ++i) {
        p.t = s.reverse ? to.T - 1 - i : i;
        to.multiply(R, p.bytes, planes * to.N, planes * to.N, 0, p.product);
        to.add(kernel, grid, p);
        to.point(place_of(p, p.s.lengths), Given::lengths);
        p.before = p.t;
    }
}

}  // namespace

void Launches::multiply(const GemmWeights &weights, Address rows, int64_t count, int64_t chunk,
                        int64_t stride, Address product) {
    const ProductC p{rows,   weights.weights, product,         count,        chunk,
                     stride, weights.padded,  weights.columns, weights.third};
    Grid grid;
    grid.x = static_cast<unsigned>((weights.third + kTileUnits - 1) / kTileUnits *
                                   ((count + kTileRows - 1) / kTileRows));
    grid.threads = 128;
    grid.shared_bytes = kTileBytes;
    add({"projection/byte_product", "byte_product", {}}, grid, p);
}

void Launches::split_codes(const QuantizerNumbers &q, Address codes, int64_t count,
                           int64_t features, Address bytes) {
    ProjectC p{};
    p.s.x = codes;
    p.s.x_kind = kind_of(q);
    p.s.T = 1;
    p.s.N = count;
    p.s.C = features;
    p.bytes = bytes;
    p.planes_x = planes_of(q.bits);
    p.padded_C = padded_features(features);
    p.x_offset = byte_offset(q);
    Grid grid;
    grid.x = static_cast<unsigned>(count);
    grid.threads = threads_for(p.padded_C);
    add({"projection/int_mm", "split", kPlain}, grid, p);
}

void add_steps(Launches &to, Cell &cell, const SequenceC &s) {
    const RecurrenceShape shape = make_shape(to.H(), 1, 1, 1, 1);
    const GemmWeights &W = cell.gemm(0);
    const Address bytes = to.reserve(cell.x_planes() * to.T * to.N * W.padded);
    const Address Wx = to.reserve(4 * shape.projected_words(cell.form(), to.T, to.N));
    to.split_codes(cell.numbers().x, s.x, to.T * to.N, cell.C(), bytes);
    project_by_products(to, cell, {Wx, cell.projection(to.T, to.N, shape)}, bytes);
    if (cell.form().gates.in_float)
        add_all_steps<float>(to, cell, s, Wx, shape.units);
    else
        add_all_steps<double>(to, cell, s, Wx, shape.units);
}

}  // namespace quant_gru::cuda
