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
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/gpu_numbers.hpp"
#include "cuda/host/projections.hpp"
#include "cuda/host/recurrences.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

using cuda::CallForm;
using cuda::Form;
using cuda::GateNumbers;
using cuda::Kernel;
using cuda::Launches;
using cuda::Layers;
using cuda::Place;
using kernel_runtime::cuda::Address;

using Tables = std::array<std::tuple<Address, Address, Address, Address>, 3>;
using Sums = std::vector<std::pair<int64_t, int64_t>>;  // k and M of one term

// A cell whose arrays are tensors of Python. `arrays` returns addresses, see forward/arrays.py.
class TensorCell : public cuda::Cell {
 public:
    TensorCell(const CellNumbers &numbers, std::shared_ptr<const GateNumbers> gates,
               const Form &form, const Tables &tables, const Sums &sums, nb::object arrays)
        : Cell(numbers, std::move(gates), form, terms(sums)), arrays_(std::move(arrays)) {
        for (size_t i = 0; i < tables.size(); ++i) {
            const auto [direct, lines, bounds, coefficients] = tables[i];
            places_[i] = {direct, lines, bounds, coefficients};
        }
    }

    Address multipliers_R() const override { return address("multipliers_R"); }
    Address finite() const override { return address("finite"); }
    Address exact_W() const override { return address("exact_W"); }
    Address exact_R() const override { return address("exact_R"); }
    Address tiles() override { return address("tiles"); }
    cuda::MatrixC W() const override { return record(call("W")); }
    std::array<cuda::MatrixC, 2> transposed() override {
        const auto found = nb::cast<std::pair<nb::bytes, nb::bytes>>(call("transposed"));
        return {record(found.first), record(found.second)};
    }
    cuda::GemmWeights gemm(int which) override {
        using Found = std::tuple<Address, Address, int64_t, int64_t, int>;
        const auto [weights, folded, columns, padded, planes] =
            nb::cast<Found>(arrays_.attr("gemm")(which));
        return {weights, folded, columns, 0, padded, planes};
    }
    cuda::ByteWeights bytes() const override {
        using Found = std::tuple<Address, Address, Address, Address, int64_t>;
        const auto [weights, folded, folded_bytes, m_float, padded] =
            nb::cast<Found>(call("bytes"));
        return {weights, folded, folded_bytes, m_float, padded};
    }
    cuda::Fragments fragments(int64_t features, int64_t units) override {
        using Found = std::tuple<Address, Address, Address>;
        const auto [weights, bias, m] = nb::cast<Found>(arrays_.attr("fragments")(features, units));
        return {weights, bias, m};
    }

 private:
    static std::vector<SumNumbers> terms(const Sums &sums) {
        std::vector<SumNumbers> found;
        for (const auto &[k, M] : sums) found.push_back({1, k, {M, 0}});
        return found;
    }
    static cuda::MatrixC record(const nb::object &bytes) {
        const nb::bytes given = nb::cast<nb::bytes>(bytes);
        cuda::MatrixC found{};
        if (given.size() != sizeof found) throw nb::value_error("Expected the bytes of a MatrixC");
        std::memcpy(&found, given.c_str(), sizeof found);
        return found;
    }
    nb::object call(const char *name) const { return arrays_.attr(name)(); }
    Address address(const char *name) const { return nb::cast<Address>(call(name)); }

    nb::object arrays_;
};

// Gate arithmetic, form, C and H, bits of W and R, addresses of tables, sums, arrays.
using CellTuple =
    std::tuple<nb::object, Form, std::array<int, 2>, std::array<int, 2>, Tables, Sums, nb::object>;

std::unique_ptr<cuda::Cell> cell_of(const CellTuple &given) {
    const auto &[gates, form, sizes, bits, tables, sums, arrays] = given;
    const nb::object owner = gates;
    const std::shared_ptr<const GateNumbers> shared(nb::cast<const GateNumbers *>(owner),
                                                    [owner](const GateNumbers *) {});
    CellNumbers numbers = shared->numbers;
    numbers.W.inputs = sizes[0];
    numbers.H = numbers.R.inputs = sizes[1];
    numbers.W.weight_bits = bits[0];
    numbers.R.weight_bits = bits[1];
    return std::make_unique<TensorCell>(numbers, shared, form, tables, sums, arrays);
}

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

// Source, function, macros, grid, arguments, fields with their memory and offset, the fields that
// describe x or None, and a product of the caller or None.
nb::tuple tuple_of(const cuda::Launch &launch, const Layers &layers, const nb::dict &macros) {
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
        fields, input, product_of(launch, layers));
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

}  // namespace

void bind_gpu_launches(nb::module_ &m) {
    m.def("launches_of", &launches_of);
    m.def("code_launches_of", &code_launches_of);
    m.def("projection_of", &projection_of, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg().none() = nb::none());
}

}  // namespace quant_gru
