#include "cuda/host/recurrences.hpp"

#include <algorithm>

#include "cuda/host/projections.hpp"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kFewestRows = 32;  // of products of a caller

template <class Real>
void add_all_steps(Launches &to, Cell &cell, const CodeSequence &s, Place Wx, int64_t units) {
    const GemmWeights R = cell.gemm(1);
    const int planes = cell.form().state_bytes;
    const int64_t N = to.N, own = planes * N;
    const int64_t rows = to.form.own_products ? own : std::max(own, kFewestRows);
    const Place product = to.product_room(4 * rows * R.columns);
    const Place bytes = to.reserve(rows * R.padded);
    // the split also writes the padding, which steps leave alone
    to.split_codes(cell.numbers().h, s.h0, N, to.H(), bytes);
    Draft<StepC<Real>> p;
    s.fill(to, cell, p, p->s);
    p->m = cell.multipliers_R();
    p->folded = R.folded;
    p.point(p->product, product);
    p.point(p->bytes, bytes);
    p.point(p->Wx, Wx);
    p->planes_h = planes;
    p->planes_R = R.planes;
    p->columns = R.columns;
    p->padded_H = R.padded;
    p->groups = units / 16;
    p->wide = cell.form().wide_input;
    p->before = -1;
    p->cell = cell.gates<Real>();
    const Form &form = cell.form();
    Kernel kernel{
        "recurrence/per_step", "step", {{"REAL", sizeof(Real) == 4 ? "float" : "double"}}};
    kernel.macros["QG_WORDS"] = std::to_string(form.words);
    kernel.macros.merge(form.products());
    Grid grid;
    grid.x = static_cast<unsigned>(N);
    grid.y = static_cast<unsigned>((to.H() + 255) / 256);
    grid.threads = 256;
    for (int64_t i = 0; i < to.T; ++i) {
        p->t = s.reverse ? to.T - 1 - i : i;
        to.multiply(cell, 1, bytes, rows, rows, 0, product);
        to.add(kernel, grid, p);
        p->before = p->t;
    }
}

void add_generic(Launches &to, Cell &cell, const CodeSequence &s) {
    const Place space = to.reserve(to.N * 2 * to.H() * 8);
    const auto [W, R] = cell.transposed();
    Draft<std::array<GenericC, 2>> pair;
    for (GenericC &p : pair.arguments) {
        s.fill(to, cell, pair, p.s);
        pair.point(p.s.workspace, space);
        p.W = W;
        p.R = R;
        p.cell = cell.gates<double>();
    }
    Kernel kernel{"recurrence/wide_integers", "generic", {{"QG_WORDS", "1"}}};
    kernel.macros["QG_RULE"] = std::to_string(cell.numbers().rounding);
    kernel.macros.merge(cell.form().products());
    Grid grid;
    grid.x = static_cast<unsigned>(to.N);
    grid.threads = 256;
    to.add(kernel, grid, pair);
}

template <class Real>
void add_persistent(Launches &to, size_t layer, const Group &group,
                    const std::vector<CodeSequence> &sequences) {
    const auto count = group.directions.size();
    Draft<std::array<RecurrentC<Real>, 2>> draft;
    for (size_t i = 0; i < count; ++i) {
        const CodeSequence &s = sequences[group.directions[i]];
        Cell &cell = to.layers.cell(layer, group.directions[i]);
        RecurrentC<Real> &p = draft.arguments[i];
        s.fill(to, cell, draft, p.s);
        fill_recurrent(draft, p, cell, group, project_from_codes(to, cell, *group.shape, s.x));
    }
    RecurrenceUse use;
    use.held = sequences[group.directions[0]].has_held();
    const Layout layout =
        recurrence_layout(*group.shape, group.form, to.H(), to.N, static_cast<int>(count), use);
    to.add(layout.kernel, layout.grid, draft, count * sizeof(RecurrentC<Real>));
}

void add_steps(Launches &to, Cell &cell, const CodeSequence &s) {
    if (!cell.form().narrow || !Cell::sums_fit(cell.C()) || !Cell::sums_fit(to.H()))
        return add_generic(to, cell, s);
    const RecurrenceShape shape = make_shape(to.H(), 1, 1, 1, 1);
    const Place Wx = project_from_codes(to, cell, shape, s.x);
    if (cell.form().gates.in_float)
        add_all_steps<float>(to, cell, s, Wx, shape.units);
    else
        add_all_steps<double>(to, cell, s, Wx, shape.units);
}

}  // namespace

std::vector<Group> grouped(const Launches &to, size_t layer,
                           const std::vector<size_t> &directions) {
    const Clusters &clusters = to.layers.chip.clusters;
    std::vector<DirectionForm> forms;
    for (const size_t d : directions)
        forms.push_back({to.layers.cell(layer, d).form(), to.layers.cell(layer, d).tables()});
    std::vector<Group> groups;
    const auto shared = shared_form(forms, to.H(), to.N, clusters);
    if (shared)
        groups.push_back({directions, *shared, {}});
    else
        for (size_t i = 0; i < forms.size(); ++i)
            groups.push_back({{directions[i]}, forms[i].form, {}});
    for (Group &group : groups)
        if (!to.policy.by_steps)
            group.shape = choose_shape(group.form, to.H(), to.N,
                                       static_cast<int>(group.directions.size()), clusters);
    return groups;
}

void add_code_layer(Launches &to, size_t layer, const std::vector<CodeSequence> &sequences) {
    std::vector<size_t> all;
    for (size_t d = 0; d < sequences.size(); ++d) all.push_back(d);
    // a kernel is compiled with or without held units
    std::vector<std::vector<size_t>> sets{all};
    if (sequences.front().has_held() != sequences.back().has_held()) sets = {{0}, {1}};
    for (const std::vector<size_t> &set : sets)
        for (const Group &group : grouped(to, layer, set)) {
            if (!group.shape)
                for (const size_t d : group.directions)
                    add_steps(to, to.layers.cell(layer, d), sequences[d]);
            else if (group.form.recurrence().in_float)
                add_persistent<float>(to, layer, group, sequences);
            else
                add_persistent<double>(to, layer, group, sequences);
        }
}

}  // namespace quant_gru::cuda
