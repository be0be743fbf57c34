#include "bindings/gpu_launches.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/gpu_numbers.hpp"
#include "bindings/plan_from_dict.hpp"
#include "bindings/tensor_cell.hpp"
#include "cuda/host/boundary.hpp"
#include "cuda/host/projections.hpp"
#include "cuda/host/recurrences.hpp"

namespace nb = nanobind;

namespace quant_gru {
nb::tuple launch_tuple(const cuda::Launch &launch, const nb::dict &macros,
                       const nb::object &product) {
    std::vector<std::tuple<size_t, int, int64_t>> fields;
    for (const cuda::Field &each : launch.fields)
        fields.emplace_back(each.at, static_cast<int>(each.place.block), each.place.offset);
    nb::object input = nb::none();
    if (launch.input) {
        const auto &[step, next, fours] = *launch.input;
        input = nb::make_tuple(step, next, fours);
    }
    return nb::make_tuple(
        launch.kernel.source, launch.kernel.function, macros, grid_tuple(launch.grid),
        nb::bytes(reinterpret_cast<const char *>(launch.arguments.data()), launch.arguments.size()),
        fields, input, product);
}

namespace {

using cuda::CallForm;
using cuda::Kernel;
using cuda::Launches;
using cuda::Layers;
using cuda::Place;
using kernel_runtime::cuda::Address;

Layers layers_of(const std::vector<CellTuple> &cells, int64_t directions, const cuda::Chip &chip) {
    Layers layers{0, 0, directions, chip, {}};
    for (const CellTuple &each : cells) layers.cells.push_back(cell_of(each));
    layers.C = layers.cells.at(0)->C();
    layers.H = layers.cells.at(0)->H();
    return layers;
}

using PlaceTuple = std::pair<int, int64_t>;

PlaceTuple tuple_of(const Place &place) { return {static_cast<int>(place.block), place.offset}; }

nb::object product_of(const cuda::Launch &launch, const Layers &layers) {
    if (!launch.product) return nb::none();
    const cuda::Product &p = *launch.product;
    size_t cell = 0;
    while (layers.cells[cell].get() != p.cell) ++cell;
    return nb::make_tuple(cell, p.which, p.count, p.padded, p.columns, tuple_of(p.rows),
                          tuple_of(p.result));
}

nb::tuple tuple_of(const cuda::Launch &launch, const Layers &layers, const nb::dict &macros) {
    return launch_tuple(launch, macros, product_of(launch, layers));
}

// Launches of one kernel that follow each other share a dictionary of macros.
nb::list list_of(const Launches &made) {
    nb::list found;
    const Kernel *before = nullptr;
    nb::dict macros;
    for (const cuda::Launch &each : made.all) {
        if (!each.product && (!before || !(*before == each.kernel))) {
            before = &each.kernel;
            macros = dict_of(before->macros);
        }
        found.append(tuple_of(each, made.layers, macros));
    }
    return found;
}

// Dtypes of x, of h0 or -1 without it, of y and of h_n; whether rows are packed.
using FormTuple = std::tuple<int, int, int, int, bool>;

// Returns the launches, bytes of the workspace and of kept codes, and the offset and container of
// each cell's codes; None if weights fit no registers, or codes have more than 16 bits.
nb::object launches_of(const std::vector<CellTuple> &cells, int64_t directions,
                       const cuda::Chip &chip, int64_t T, int64_t N, const FormTuple &given,
                       bool keeps, const cuda::ProjectionPolicy &policy, const nb::object &expect) {
    const Layers layers = layers_of(cells, directions, chip);
    CallForm form;
    std::tie(form.values, form.states, form.results, form.last, form.is_packed) = given;
    form.has_states = form.states >= 0;
    form.keeps = keeps;
    Launches made(layers, form, T, N, policy, [&expect](const Kernel &kernel) {
        expect(kernel.source, kernel.function, dict_of(kernel.macros));
    });
    if (!made.add_fast()) return nb::none();
    nb::list kept;
    for (const cuda::KeptCodes &each : made.kept)
        kept.append(nb::make_tuple(each.offset, static_cast<int>(each.container)));
    return nb::make_tuple(list_of(made), made.space, made.codes, kept);
}

Place fixed(Address address) { return {cuda::Block::fixed, static_cast<int64_t>(address)}; }

// Addresses of codes of x, h0, out and last, whether steps are reversed, and the address of held.
using SequenceTuple = std::tuple<Address, Address, Address, Address, bool, Address>;

// Returns the launches of the directions of a layer on codes, and bytes of the workspace.
nb::tuple code_launches_of(const std::vector<CellTuple> &cells, const cuda::Chip &chip, int64_t T,
                           int64_t N, const std::vector<SequenceTuple> &sequences,
                           const cuda::ProjectionPolicy &policy) {
    const Layers layers = layers_of(cells, static_cast<int64_t>(cells.size()), chip);
    Launches made(layers, {}, T, N, policy);
    std::vector<cuda::CodeSequence> all;
    for (const auto &[x, h0, out, last, reverse, held] : sequences)
        all.push_back({fixed(x), fixed(h0), fixed(out), fixed(last), reverse, fixed(held)});
    if (all.size() != cells.size()) throw nb::value_error("Expected a sequence for each cell");
    add_code_layer(made, 0, all);
    return nb::make_tuple(list_of(made), made.space);
}

// How a projection is computed: blocks; or a warp for each unit, from real values or from codes.
using Blocks =
    std::variant<bool, cuda::Tile, cuda::WeightStationary, cuda::TiledReals, cuda::Warpgroups>;

// Returns the launch of one projection, which reads x and writes y, NaN flags and counts.
nb::tuple projection_of(const CellTuple &given, const cuda::Chip &chip, int64_t T, int64_t N,
                        const cuda::RecurrenceShape &shape, const Blocks &blocks,
                        const std::optional<cuda::Overlap> &overlap) {
    std::vector<CellTuple> cells{given};
    const Layers layers = layers_of(cells, 1, chip);
    Launches to(layers, {}, T, N);
    cuda::Cell &cell = layers.cell(0, 0);
    const Place x{cuda::Block::x}, nan{cuda::Block::nan}, counts{cuda::Block::space};
    const cuda::Projected out{{cuda::Block::y}, cell.projection(T, N, shape)};
    if (const bool *reals = std::get_if<bool>(&blocks))
        *reals ? project_reals(to, cell, out, nan) : project_codes(to, cell, out, x);
    else if (const auto *tile = std::get_if<cuda::Tile>(&blocks))
        project_bytes(to, cell, out, *tile, x, overlap, counts);
    else if (const auto *passing = std::get_if<cuda::WeightStationary>(&blocks))
        project_bytes(to, cell, out, *passing, x, overlap, counts);
    else if (const auto *tiled = std::get_if<cuda::TiledReals>(&blocks))
        project_reals_tiled(to, cell, out, *tiled, nan);
    else
        project_reals_tiled(to, cell, out, std::get<cuda::Warpgroups>(blocks), nan);
    return tuple_of(to.last(), layers, dict_of(to.last().kernel.macros));
}

template <class Arguments>
nb::tuple boundary_launch(const char *source, const char *function, const cuda::Rules &rules,
                          int64_t rows, const cuda::Draft<Arguments> &draft) {
    cuda::Macros macros = rules.macros();
    macros.insert(cuda::kPlain.begin(), cuda::kPlain.end());
    const Kernel kernel{std::string("boundary/") + source, function, std::move(macros)};
    return launch_tuple(launch_of(kernel, cuda::rows_grid(rows), draft), dict_of(kernel.macros));
}

// Addresses of real values (rows, features), of codes, and of NaN flags (rows).
nb::tuple quantize_launch(const QuantizerTuple &given, int rule, int64_t rows, int64_t features,
                          Address real, Address codes, Address nan) {
    cuda::Draft<cuda::BorderC> draft = cuda::border_of(quantizer_numbers(given), rows, features);
    draft->real = real;
    draft->codes = codes;
    draft->nan = nan;
    return boundary_launch("quantize_dequantize", "quantize", {0, rule}, rows, draft);
}

nb::tuple dequantize_launch(const QuantizerTuple &given, int64_t rows, int64_t features,
                            Address codes, Address nan, Address values) {
    cuda::Draft<cuda::BorderC> draft = cuda::border_of(quantizer_numbers(given), rows, features);
    draft->codes = codes;
    draft->nan = nan;
    draft->values = values;
    return boundary_launch("quantize_dequantize", "dequantize", {}, rows, draft);
}

nb::tuple mask_launch(const QuantizerTuple &given, int rule, const std::array<int64_t, 2> &strides,
                      const std::array<int64_t, 3> &shape, Address real, Address grad) {
    cuda::Draft<cuda::MaskC> draft =
        cuda::mask_of(quantizer_numbers(given), strides[0], strides[1], shape);
    draft->real = real;
    draft->grad = grad;
    return boundary_launch("clamp_mask", "mask_clamped", {0, rule}, draft->rows, draft);
}

// For each direction: k, M, the quantizers below and above, and the rule; and addresses of codes.
using RequantizerTuple = std::tuple<int64_t, int64_t, QuantizerTuple, QuantizerTuple, int>;

nb::tuple requantize_launch(const std::vector<RequantizerTuple> &given,
                            const std::vector<Address> &codes, int64_t rows, int64_t H, Address to,
                            Address grad) {
    if (given.empty() || given.size() > 2 || codes.size() != given.size())
        throw nb::value_error("Expected one or two directions");
    std::vector<cuda::Below> below;
    for (const auto &[k, M, q, above, rule] : given)
        below.push_back({quantizer_numbers(q), {1, k, {M, 0}}});
    const auto &[k, M, q, above, rule] = given[0];
    cuda::Draft<cuda::RequantizeCodesC> draft =
        cuda::requantization_of(below, quantizer_numbers(above), rows, H);
    for (size_t d = 0; d < codes.size(); ++d) draft->codes[d] = codes[d];
    draft->to = to;
    draft->grad = grad;
    return boundary_launch("requantize_training", "requantize_codes", {rule, 0}, rows, draft);
}

nb::tuple events_launch(Address seed, Address events, const std::array<int64_t, 3> &shape,
                        int64_t chance, int64_t stream) {
    const auto [A, B, C] = shape;
    const cuda::Launch launch = cuda::events_of({seed, events, A, B, C, chance, stream});
    return launch_tuple(launch, dict_of(launch.kernel.macros));
}

}  // namespace

void bind_gpu_launches(nb::module_ &m) {
    m.def("launches_of", &launches_of);
    m.def("code_launches_of", &code_launches_of);
    m.def("quantize_launch", &quantize_launch);
    m.def("dequantize_launch", &dequantize_launch);
    m.def("mask_launch", &mask_launch);
    m.def("requantize_launch", &requantize_launch);
    m.def("events_launch", &events_launch);
    m.def("projection_of", &projection_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg().none() = nb::none());
}

}  // namespace quant_gru
