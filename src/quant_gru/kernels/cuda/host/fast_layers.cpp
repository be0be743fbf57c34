// The launches of layers whose operators have at most 16 bits and whose weights fit registers:
// quantizing the input, the input projection, and the persistent recurrence.
#include <algorithm>

#include "cuda/host/projections.hpp"
#include "cuda/host/recurrences.hpp"

namespace quant_gru::cuda {
namespace {

bool same(const QuantizerNumbers &a, const QuantizerNumbers &b) {
    return a.bits == b.bits && a.is_signed == b.is_signed && a.scale == b.scale && a.zero == b.zero;
}

// Whether both cells read the same input codes.
bool reads_as(const Cell &a, const Cell &b) {
    if (!same(a.border(), b.border())) return false;
    for (size_t i = 0; i < a.between().size(); ++i)
        if (a.between()[i].M[0] != b.between()[i].M[0] || a.between()[i].k != b.between()[i].k)
            return false;
    return true;
}

// The input of a direction.
struct Input {
    Selection selection{Projection::codes_few};
    Projected out{};
    std::optional<Overlap> overlap;
    Place counts{};              // of finished rows per time chunk, with an overlap
    std::optional<Place> codes;  // nothing if the projection reads real values
};

bool as_bytes(const Input &input) {
    return input.selection.method == Projection::bytes ||
           input.selection.method == Projection::products;
}

class FastLayers {
 public:
    explicit FastLayers(Launches &to)
        : to_(to),
          net_(to.layers),
          D_(static_cast<size_t>(net_.directions)),
          chip_(net_.chip),
          T_(to.T),
          N_(to.N) {}

    bool add() {
        std::vector<size_t> directions;
        for (size_t d = 0; d < D_; ++d) directions.push_back(d);
        std::vector<std::vector<Group>> layers;
        for (size_t i = 0; i < net_.layers(); ++i) {
            layers.push_back(grouped(to_, i, directions));
            for (const Group &group : layers.back())
                if (!group.shape) return false;
        }
        int64_t words[2] = {0, 0}, bytes[2] = {0, 0};
        for (size_t i = 0; i < net_.layers(); ++i)
            for (const Group &group : layers[i])
                for (const size_t d : group.directions) {
                    words[d] = std::max(words[d], group.shape->projected_words(group.form, T_, N_));
                    bytes[d] = std::max<int64_t>(bytes[d], group.form.out_bytes);
                }
        for (size_t d = 0; d < D_; ++d) {
            Wx_[d] = to_.reserve(4 * words[d]);
            if (net_.layers() > 1 && !to_.form.keeps)
                states_[d] = to_.reserve(bytes[d] * T_ * N_ * to_.H());
        }
        for (size_t i = 0; i < net_.layers(); ++i) add_layer(i, layers[i]);
        return true;
    }

 private:
    void add_layer(size_t layer, const std::vector<Group> &groups) {
        below_nan_ = nan_;
        below_h0_nan_ = h0_nan_;
        below_ = states_;
        nan_ = to_.reserve(N_ * to_.flag_stride());
        select_methods(layer, groups);
        for (const Group &group : groups) to_.expect(layout_of(layer, group).kernel);
        add_all_codes(layer);
        for (size_t d = 0; d < D_; ++d)
            if (to_.form.keeps) states_[d] = to_.keep(net_.cell(layer, d).numbers().h.container());
        for (const Group &group : groups) {
            bool writes_nan = false;
            for (const size_t d : group.directions) {
                project(net_.cell(layer, d), inputs_[d]);
                writes_nan = writes_nan || reads_reals(inputs_[d].selection.method);
            }
            if (writes_nan && !layer) to_.clear_padding(nan_);
            if (group.form.recurrence().in_float)
                add_recurrence<float>(layer, group);
            else
                add_recurrence<double>(layer, group);
        }
    }

    void select_methods(size_t layer, const std::vector<Group> &groups) {
        for (const Group &group : groups)
            for (const size_t d : group.directions) {
                const Cell &cell = net_.cell(layer, d);
                const RecurrenceShape &shape = *group.shape;
                Input &input = inputs_[d] = {};
                input.out = {Wx_[d], cell.projection(T_, N_, shape)};
                // a recurrence can wait for one projection only, which runs forwards in time
                if (d == 0 && group.directions.size() == 1)
                    input.overlap = overlap_of(chip_, input.out.size, cell.form(), to_.policy);
                input.selection =
                    select_projection(chip_, input.out.size, !layer, input.overlap, to_.policy);
                if (to_.form.has_states) h0_nan_[d] = to_.reserve(N_);
            }
    }

    // Adds the input codes of the directions that read codes. Equal ones are computed once.
    void add_all_codes(size_t layer) {
        bool any = false;
        for (size_t d = 0; d < D_; ++d) {
            Input &input = inputs_[d], &first = inputs_[0];
            if (reads_reals(input.selection.method)) continue;
            any = true;
            const Cell &cell = net_.cell(layer, d);
            const bool again = d == 1 && first.codes && as_bytes(first) == as_bytes(input) &&
                               reads_as(cell, net_.cell(layer, 0));
            if (input.overlap) input.counts = to_.reserve(4 * input.overlap->chunks(T_));
            input.codes = again ? first.codes : add_codes(layer, cell, input);
        }
        // NaN that a layer below spreads beyond a length has reached the steps before it, too
        if (any && !layer) to_.clear_padding(nan_);
    }

    void project(Cell &cell, const Input &input) {
        switch (input.selection.method) {
            case Projection::reals_few:
                return project_reals(to_, cell, input.out, nan_);
            case Projection::reals_tiled:
                return project_reals_tiled(to_, cell, input.out, *input.selection.reals, nan_);
            case Projection::codes_few:
                return project_codes(to_, cell, input.out, *input.codes);
            case Projection::bytes:
                return project_bytes(to_, cell, input.out, *input.selection.codes, *input.codes,
                                     input.overlap, input.counts);
            case Projection::products:
                return project_by_products(to_, cell, input.out, *input.codes);
        }
    }

    // Describes where codes go.
    template <class Arguments>
    void aim(Draft<Arguments> &draft, const Cell &cell, const Input &input, Place codes) const {
        TargetC &to = draft->to;
        to.kind = kind_of(cell.numbers().x);
        to.T = T_;
        to.N = N_;
        to.features = cell.C();
        draft.point(to.nan, nan_);
        to.nan_stride = to_.flag_stride();
        if (as_bytes(input)) {
            draft.point(to.bytes, codes);
            to.planes = cell.x_planes();
            to.padded = padded_features(cell.C());
            to.x_offset = cell.x_offset();
        } else {
            draft.point(to.codes, codes);
        }
        if (input.overlap) {
            draft.point(to.counts, input.counts);
            to.stretches = input.overlap->chunks(T_);
        }
    }

    // Adds the launch that writes input codes, as signed bytes or in their container.
    Place add_codes(size_t layer, const Cell &cell, const Input &input) {
        const QuantizerNumbers &x = cell.border();
        const int64_t row = as_bytes(input) ? cell.x_planes() * padded_features(cell.C())
                                            : cell.C() * container_bytes(x.container());
        const Place codes = to_.reserve(T_ * N_ * row);
        if (layer) {
            requantize(layer, cell, input, codes);
            return codes;
        }
        Draft<QuantizeInputC> p;
        aim(p, cell, input, codes);
        p->zero = x.zero;
        p->scale = x.scale;
        p->lo = static_cast<float>(x.lo() - x.zero);
        p->hi = static_cast<float>(x.hi() - x.zero);
        if (input.out.size.divides) p->division = division_of(x);
        if (as_bytes(input) && input.out.size.divides)
            to_.read_fours(p, p.arguments);
        else
            to_.read(p, p.arguments);
        Grid grid;
        grid.x = static_cast<unsigned>((T_ * N_ + 15) / 16);
        grid.threads = 256;
        to_.add({"boundary/quantize_input", "quantize_input", plain_of(cell.numbers())}, grid, p);
        return codes;
    }

    void requantize(size_t layer, const Cell &cell, const Input &input, Place codes) {
        const QuantizerNumbers &x = cell.numbers().x;
        Draft<RequantizeLayersC> p;
        aim(p, cell, input, codes);
        p.point(p->below.nan, below_nan_);
        p->below.T = T_;
        p->below.stride = to_.flag_stride();
        for (size_t d = 0; d < D_; ++d) {
            const Cell &under = net_.cell(layer - 1, d);
            if (to_.form.has_states) p.point(p->below.h0_nan[d], below_h0_nan_[d]);
            p->below.finite[d] = under.finite();
            p.point(p->codes[d], below_[d]);
            p->kind[d] = kind_of(under.numbers().h);
            p->zero[d] = under.numbers().h.zero;
            p->M[d] = cell.between()[d].M[0];
            p->k[d] = cell.between()[d].k;
        }
        p->H = to_.H();
        p->directions = net_.directions;
        p->lo = x.lo() - x.zero;
        p->hi = x.hi() - x.zero;
        p->out_zero = x.zero;
        to_.add({"boundary/requantize_layers", "requantize_layers", plain_of(cell.numbers())},
                rows_grid(T_ * N_), p);
    }

    bool is_top(size_t layer) const { return layer + 1 == net_.layers(); }
    // Whether codes of the states of a layer are read later.
    bool writes_codes(size_t layer) const { return !is_top(layer) || to_.form.keeps; }

    Layout layout_of(size_t layer, const Group &group) const {
        const auto D = static_cast<int>(group.directions.size());
        const std::optional<Overlap> &overlap = inputs_[group.directions[0]].overlap;
        RecurrenceUse use;
        use.states = StateOutputs{is_top(layer), writes_codes(layer)};
        use.early = starts_early(*group.shape, N_, D, chip_.clusters);
        use.chunk = overlap ? overlap->chunk : 0;
        return recurrence_layout(*group.shape, group.form, to_.H(), N_, D, use);
    }

    template <class Real>
    void add_recurrence(size_t layer, const Group &group) {
        const auto count = group.directions.size();
        Draft<std::array<RecurrentC<Real>, 2>> p;
        for (size_t i = 0; i < count; ++i) fill(p, i, layer, group);
        const Input &first = inputs_[group.directions[0]];
        if (first.overlap) p.point(p.arguments[0].counts, first.counts);
        const Layout layout = layout_of(layer, group);
        to_.add(layout.kernel, layout.grid, p, count * sizeof(RecurrentC<Real>));
    }

    template <class Real>
    void fill(Draft<std::array<RecurrentC<Real>, 2>> &draft, size_t i, size_t layer,
              const Group &group) {
        RecurrentC<Real> &p = draft.arguments[i];
        const size_t d = group.directions[i];
        Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &h = cell.numbers().h;
        const auto state = static_cast<int64_t>(layer * D_ + d);
        const int64_t first = 4 * state * N_ * to_.H();
        p.s = to_.sequence_of(cell);
        p.s.reverse = d == 1;
        if (writes_codes(layer)) draft.point(p.s.out, states_[d]);
        draft.point(p.s.lengths, {Block::lengths});
        fill_recurrent(draft, p, cell, group, Wx_[d]);
        RealBoundaryC &boundary = p.boundary;
        if (to_.form.has_states) {
            draft.point(boundary.h0, to_.h0() + first);
            draft.point(boundary.h0_nan, h0_nan_[d]);
        }
        if (is_top(layer))
            draft.point(boundary.values, to_.y() + 4 * static_cast<int64_t>(d) * to_.H());
        draft.point(boundary.last, to_.h_n() + first);
        draft.point(boundary.last_nan, {Block::nan, 4 * state * N_});
        draft.point(boundary.nan, nan_);
        boundary.finite = cell.finite();
        boundary.next = to_.width();
        boundary.stride = to_.flag_stride();
        boundary.scale = h.scale;
        boundary.lo = static_cast<float>(h.lo() - h.zero);
        boundary.hi = static_cast<float>(h.hi() - h.zero);
    }

    Launches &to_;
    const Layers &net_;
    const size_t D_;
    const Chip &chip_;
    const int64_t T_, N_;
    Input inputs_[2];  // of the layer that is added
    // By direction: W x for all layers, codes of the states of this layer and of the one below.
    std::array<Place, 2> Wx_{}, states_{}, below_{};
    Place nan_{}, below_nan_{};  // NaN flags of the inputs of this layer and of that below
    std::array<Place, 2> h0_nan_{}, below_h0_nan_{};
};

}  // namespace

bool add_fast_layers(Launches &to) { return FastLayers(to).add(); }

}  // namespace quant_gru::cuda
