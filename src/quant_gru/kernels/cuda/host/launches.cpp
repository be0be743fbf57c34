#include "cuda/host/launches.hpp"

#include <algorithm>

#include "cuda/host/conversions.hpp"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kTileUnits = 32, kTileRows = 32, kTileBytes = 4 * 64 * (3 * 32 + 32);

struct PaddingC {
    Address nan, lengths;
    int64_t T, N, stride;
};

struct ResultsC {
    Address from, to, lengths;
    int64_t T, N, features, step, next;
};

struct ProductC {
    Address rows, weights, product;
    int64_t count, chunk, stride, padded, columns, third;
};

}  // namespace

Grid rows_grid(int64_t rows) {
    Grid grid;
    grid.x = static_cast<unsigned>((rows + 7) / 8);
    grid.threads = 256;
    return grid;
}

unsigned threads_for(int64_t work) {
    return static_cast<unsigned>(std::min<int64_t>(256, (work + 31) / 32 * 32));
}

Launches::Launches(const Layers &of, const CallForm &call_form, int64_t steps, int64_t rows,
                   const ProjectionPolicy &given, std::function<void(const Kernel &)> expected)
    : layers(of), form(call_form), T(steps), N(rows), policy(given), expect(std::move(expected)) {}

bool Launches::add_fast() {
    begin();
    if (!add_fast_layers(*this)) return false;
    finish();
    return true;
}

void Launches::add_general() {
    begin();
    add_general_layers(*this);
    finish();
}

int64_t take(int64_t &size, int64_t bytes) {
    const int64_t start = size;
    size += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return start;
}

Place Launches::product_room(int64_t bytes) {
    if (bytes > product_bytes_) {
        product_ = reserve(bytes);
        product_bytes_ = bytes;
    }
    return product_;
}

Place Launches::keep(Container container) {
    const int64_t start = take(codes, T * N * H() * container_bytes(container));
    kept.push_back({start, container});
    return {Block::codes, start};
}

// Converts what callers give in another form than kernels read, and makes room for what they want
// in another form than kernels write.
void Launches::begin() {
    const auto states = static_cast<int64_t>(layers.cells.size());
    const Place starts{Block::lengths, 8 * N};  // of the packed rows of each step
    Conversions inward;
    if (form.values || form.is_packed) {
        x_ = room(T * N * C());
        const auto [draft, rows] = inward.add({T, N, C()}, form.values, 0, {Block::x}, x_);
        draft.input = InputFields{draft.at(rows.step), draft.at(rows.next), 0};
        if (form.is_packed) draft.point(rows.packed, starts);
    }
    if (form.has_states && (form.states || form.is_packed)) {
        h0_ = room(states * N * H());
        const auto [draft, rows] = inward.add({states, N, H()}, form.states, 0, {Block::h0}, h0_);
        draft.point(rows.order, {Block::sorted});
    }
    add(inward);
    if (form.results || form.is_packed || (form.batch_first && T > 1 && N > 1))
        y_ = room(T * N * width());
    if (form.last || form.is_packed) h_n_ = room(states * N * H());
}

void Launches::finish() {
    Conversions outward;
    const bool converts = form.results || form.is_packed;
    if (converts) {
        const auto [draft, rows] = outward.add({T, N, width()}, 0, form.results, y_, {Block::y});
        if (form.is_packed) draft.point(rows.to_packed, {Block::lengths, 8 * N});
    }
    if (form.last || form.is_packed) {
        const auto states = static_cast<int64_t>(layers.cells.size());
        const auto [draft, rows] = outward.add({states, N, H()}, 0, form.last, h_n_, {Block::h_n});
        draft.point(rows.order, {Block::unsorted});
    }
    add(outward);
    if (!converts && form.has_padding) place_results();
}

void Launches::add(const Conversions &conversions) {
    for (Launch &each : conversions.launches()) all.push_back(std::move(each));
}

// Copies results to the caller's layout, or clears them beyond the lengths.
void Launches::place_results() {
    Draft<ResultsC> p;
    p->T = T;
    p->N = N;
    p->features = width();
    const bool copies = y_.block != Block::y;
    p->step = copies ? width() : N * width();
    p->next = copies ? T * width() : width();
    p.point(p->from, y_);
    p.point(p->to, {Block::y});
    p.point(p->lengths, {Block::lengths});
    add({"boundary/rows", "place_results", {}}, rows_grid(T * N), p);
    last().with_lengths = !copies;
}

SequenceC Launches::sequence_of(const Cell &cell) const {
    SequenceC s{};
    s.x_kind = kind_of(cell.numbers().x);
    s.h_kind = kind_of(cell.numbers().h);
    s.T = T;
    s.N = N;
    s.C = cell.C();
    s.H = cell.H();
    return s;
}

void Launches::split_codes(const QuantizerNumbers &q, Place codes_, int64_t count, int64_t features,
                           Place bytes) {
    Draft<ProjectC> p;
    p.point(p->s.x, codes_);
    p->s.x_kind = kind_of(q);
    p->s.T = 1;
    p->s.N = count;
    p->s.C = features;
    p.point(p->bytes, bytes);
    p->planes_x = planes_of(q.bits);
    p->padded_C = padded_features(features);
    p->x_offset = byte_offset(q);
    Grid grid;
    grid.x = static_cast<unsigned>(count);
    grid.threads = threads_for(p->padded_C);
    add({"projection/int_mm", "split", kPlain}, grid, p);
}

Launch byte_product(Place rows, Place weights, Place product, int64_t count, int64_t chunk,
                    int64_t stride, int64_t padded, int64_t columns) {
    Draft<ProductC> p;
    p.point(p->rows, rows);
    p.point(p->weights, weights);
    p.point(p->product, product);
    p->count = count;
    p->chunk = chunk;
    p->stride = stride;
    p->padded = padded;
    p->columns = columns;
    p->third = (columns + 2) / 3;
    Grid grid;
    grid.x = static_cast<unsigned>((p->third + kTileUnits - 1) / kTileUnits *
                                   ((count + kTileRows - 1) / kTileRows));
    grid.threads = 128;
    grid.shared_bytes = kTileBytes;
    return launch_of({"projection/byte_product", "byte_product", {}}, grid, p);
}

void Launches::multiply(Cell &cell, int which, Place rows, int64_t count, int64_t chunk,
                        int64_t stride, Place product) {
    const GemmWeights &weights = cell.gemm(which);
    if (!form.own_products) {
        all.emplace_back().product =
            Product{&cell, which, count, weights.padded, weights.columns, rows, product};
        return;
    }
    const Place at{Block::fixed, static_cast<int64_t>(weights.weights)};
    all.push_back(
        byte_product(rows, at, product, count, chunk, stride, weights.padded, weights.columns));
}

void Launches::clear_padding(Place nan) {
    if (!form.has_padding) return;
    Draft<PaddingC> p;
    p.point(p->nan, nan);
    p.point(p->lengths, {Block::lengths});
    p->T = T;
    p->N = N;
    p->stride = flag_stride();
    Grid grid;
    grid.x = static_cast<unsigned>((T * N + 255) / 256);
    grid.threads = 256;
    add({"boundary/rows", "clear_padding", {}}, grid, p);
    last().with_lengths = true;
}

}  // namespace quant_gru::cuda
