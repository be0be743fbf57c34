// The launches of layers whose operators have at most 16 bits and whose weights fit registers:
// quantizing the input, the input projection, and the persistent recurrence.
#include <algorithm>

#include "cuda/host/projections.hpp"

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

// Directions that share a launch of the recurrence.
struct Group {
    std::vector<size_t> directions;
    Form form;
    RecurrenceShape shape;
};

// The input of a direction.
struct Input {
    Selection selection{Projection::codes_few};
    Projected out{};
    std::optional<Overlap> overlap;
    Address counts = 0;  // of finished rows per time chunk
    Address codes = 0;   // null if the projection reads real values
};

bool as_bytes(const Input &input) {
    return input.selection.method == Projection::bytes ||
           input.selection.method == Projection::products;
}

class FastLayers {
 public:
    explicit FastLayers(Launches &to)
        : to_(to), net_(to.network), chip_(to.chip()), T_(to.T), N_(to.N) {}

    bool add() {
        const size_t D = net_.directions();
        std::vector<std::vector<Group>> layers;
        for (size_t i = 0; i < net_.layers(); ++i) {
            auto &groups = layers.emplace_back();
            if (!choose(i, groups)) return false;
        }
        int64_t words[2] = {0, 0}, bytes[2] = {0, 0};
        for (size_t i = 0; i < net_.layers(); ++i)
            for (const Group &group : layers[i])
                for (const size_t d : group.directions) {
                    words[d] = std::max(words[d], group.shape.projected_words(group.form, T_, N_));
                    bytes[d] = std::max<int64_t>(bytes[d], group.form.out_bytes);
                }
        for (size_t d = 0; d < D; ++d) {
            Wx_[d] = to_.reserve(4 * words[d]);
            if (net_.layers() > 1) states_[d] = to_.reserve(bytes[d] * T_ * N_ * to_.H());
        }
        for (size_t i = 0; i < net_.layers(); ++i) add_layer(i, layers[i]);
        return true;
    }

 private:
    bool choose(size_t layer, std::vector<Group> &groups) {
        const size_t D = net_.directions();
        std::vector<DirectionForm> forms;
        for (size_t d = 0; d < D; ++d)
            forms.push_back({net_.cell(layer, d).form(), net_.cell(layer, d).tables()});
        const auto shared = shared_form(forms, to_.H(), N_, net_.device.clusters());
        if (shared && D == 2)
            groups.push_back({{0, 1}, *shared, {}});
        else
            for (size_t d = 0; d < D; ++d) groups.push_back({{d}, forms[d].form, {}});
        for (Group &group : groups) {
            const auto found =
                choose_shape(group.form, to_.H(), N_, static_cast<int>(group.directions.size()),
                             net_.device.clusters());
            if (!found) return false;
            group.shape = *found;
        }
        return true;
    }

    void add_layer(size_t layer, const std::vector<Group> &groups) {
        below_nan_ = nan_;
        below_h0_nan_[0] = h0_nan_[0];
        below_h0_nan_[1] = h0_nan_[1];
        nan_ = to_.reserve(N_ * to_.flag_stride());
        select_methods(layer, groups);
        add_all_codes(layer);
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
                const RecurrenceShape &shape = group.shape;
                Input &input = inputs_[d] = {};
                input.out = {Wx_[d], cell.projection(T_, N_, shape)};
                // a recurrence can wait for one projection only, which runs forwards in time
                if (d == 0 && group.directions.size() == 1)
                    input.overlap = overlap_of(chip_, input.out.size, cell.form());
                input.selection = select_projection(chip_, input.out.size, !layer, input.overlap);
                h0_nan_[d] = to_.reserve(N_);
            }
    }

    // Adds the input codes of the directions that read codes. Equal ones are computed once.
    void add_all_codes(size_t layer) {
        bool any = false;
        for (size_t d = 0; d < net_.directions(); ++d) {
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
                return project_codes(to_, cell, input.out, input.codes);
            case Projection::bytes:
                return project_bytes(to_, cell, input.out, *input.selection.codes, input.codes,
                                     input.overlap, input.counts);
            case Projection::products:
                return project_by_products(to_, cell, input.out, input.codes);
        }
    }

    TargetC target_of(const Cell &cell, const Input &input, Address codes) const {
        TargetC to{};
        to.kind = kind_of(cell.numbers().x);
        to.T = T_;
        to.N = N_;
        to.features = cell.C();
        to.nan = nan_;
        to.nan_stride = to_.flag_stride();
        if (as_bytes(input)) {
            to.bytes = codes;
            to.planes = cell.x_planes();
            to.padded = padded_features(cell.C());
            to.x_offset = cell.x_offset();
        } else {
            to.codes = codes;
        }
        if (input.overlap) {
            to.counts = input.counts;
            to.stretches = input.overlap->chunks(T_);
        }
        return to;
    }

    // Adds the launch that writes input codes, as signed bytes or in their container.
    Address add_codes(size_t layer, const Cell &cell, const Input &input) {
        const QuantizerNumbers &x = cell.border();
        const int64_t row = as_bytes(input) ? cell.x_planes() * padded_features(cell.C())
                                            : cell.C() * container_bytes(x.container());
        const Address codes = to_.reserve(T_ * N_ * row);
        if (layer) {
            requantize(layer, cell, target_of(cell, input, codes));
            return codes;
        }
        QuantizeInputC p{};
        p.to = target_of(cell, input, codes);
        p.step = to_.x_step();
        p.next = to_.x_next();
        p.zero = x.zero;
        p.scale = x.scale;
        p.lo = static_cast<float>(x.lo() - x.zero);
        p.hi = static_cast<float>(x.hi() - x.zero);
        if (input.out.size.divides) p.division = division_of(x);
        Grid grid;
        grid.x = static_cast<unsigned>((T_ * N_ + 15) / 16);
        grid.threads = 256;
        to_.add({"boundary/quantize_input", "quantize_input", kPlain}, grid, p);
        to_.point(place_of(p, p.real), Given::x);
        if (as_bytes(input) && input.out.size.divides && to_.C() % 4 == 0)
            to_.last().fours_at = place_of(p, p.fours);
        return codes;
    }

    void requantize(size_t layer, const Cell &cell, const TargetC &target) {
        const QuantizerNumbers &x = cell.numbers().x;
        RequantizeLayersC p{};
        p.to = target;
        p.below.nan = below_nan_;
        p.below.T = T_;
        p.below.stride = to_.flag_stride();
        for (size_t d = 0; d < net_.directions(); ++d) {
            const Cell &under = net_.cell(layer - 1, d);
            p.below.h0_nan[d] = below_h0_nan_[d];
            p.below.finite[d] = under.finite();
            p.codes[d] = states_[d];
            p.kind[d] = kind_of(under.numbers().h);
            p.zero[d] = under.numbers().h.zero;
            p.M[d] = cell.between()[d].M[0];
            p.k[d] = cell.between()[d].k;
        }
        p.H = to_.H();
        p.directions = static_cast<int64_t>(net_.directions());
        p.lo = x.lo() - x.zero;
        p.hi = x.hi() - x.zero;
        p.out_zero = x.zero;
        to_.add({"boundary/requantize_layers", "requantize_layers", kPlain}, rows_grid(T_ * N_), p);
    }

    template <class Real>
    void add_recurrence(size_t layer, const Group &group) {
        const bool top = layer + 1 == net_.layers();
        const auto count = group.directions.size();
        RecurrentC<Real> p[2]{};
        for (size_t i = 0; i < count; ++i) fill(p[i], layer, group, group.directions[i]);
        const std::optional<Overlap> &overlap = inputs_[group.directions[0]].overlap;
        p[0].counts = inputs_[group.directions[0]].counts;
        const auto D = static_cast<int>(count);
        RecurrenceUse use;
        use.states = StateOutputs{top, !top};
        use.early = starts_early(group.shape, N_, D, net_.device.clusters());
        use.chunk = overlap ? overlap->chunk : 0;
        const Layout layout = recurrence_layout(group.shape, group.form, to_.H(), N_, D, use);
        to_.add(layout.kernel, layout.grid, p);
        to_.last().arguments.resize(count * sizeof p[0]);
        for (size_t i = 0; i < count; ++i) {
            const size_t d = group.directions[i];
            const auto state = static_cast<int64_t>(layer * net_.directions() + d);
            const int64_t first = 4 * state * N_ * to_.H();
            to_.point(place_of(p, p[i].boundary.h0), Given::h0, first);
            to_.point(place_of(p, p[i].boundary.last), Given::h_n, first);
            to_.point(place_of(p, p[i].s.lengths), Given::lengths);
            if (top)
                to_.point_results(place_of(p, p[i].boundary.values),
                                  4 * static_cast<int64_t>(d) * to_.H());
        }
    }

    template <class Real>
    void fill(RecurrentC<Real> &p, size_t layer, const Group &group, size_t d) {
        Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &h = cell.numbers().h;
        const Fragments &R = cell.fragments(group.shape.features, group.shape.units);
        p.s = to_.sequence_of(cell);
        p.s.reverse = d == 1;
        p.s.out = states_[d];
        p.weights = R.weights;
        p.bias = R.bias;
        p.m = R.m;
        p.Wx = Wx_[d];
        p.exact_float = cell.exact_R();
        p.cell = cell.gates<Real>();
        if (group.form.saturated) p.saturated = cell.saturated();
        p.boundary.h0_nan = h0_nan_[d];
        p.boundary.nan = nan_;
        p.boundary.finite = cell.finite();
        p.boundary.next = to_.width();
        p.boundary.stride = to_.flag_stride();
        p.boundary.scale = h.scale;
        p.boundary.lo = static_cast<float>(h.lo() - h.zero);
        p.boundary.hi = static_cast<float>(h.hi() - h.zero);
    }

    Launches &to_;
    Network &net_;
    const Chip chip_;
    const int64_t T_, N_;
    Input inputs_[2];                  // of the layer that is added
    Address Wx_[2] = {0, 0};           // by direction, for all layers
    Address states_[2] = {0, 0};       // codes of the states of the layer below the top
    Address nan_ = 0, below_nan_ = 0;  // NaN flags of the inputs of this layer and of that below
    Address h0_nan_[2] = {0, 0}, below_h0_nan_[2] = {0, 0};
};

}  // namespace

bool add_fast_layers(Launches &to) { return FastLayers(to).add(); }

}  // namespace quant_gru::cuda
