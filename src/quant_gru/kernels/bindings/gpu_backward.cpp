#include "bindings/gpu_backward.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gpu_numbers.hpp"
#include "bindings/tensor_cell.hpp"
#include "cuda/host/layer_backward.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

using cuda::BackGridShape;
using cuda::BackShape;
using cuda::BackwardPolicy;
using cuda::DerivativesShape;

// A cell, whether steps are reversed, and the containers of the codes of W and R.
using DirectionTuple = std::tuple<CellTuple, bool, std::array<int64_t, 2>>;

// Parts of a gradient, whether weights are exact, whether derivatives are in half precision, and
// the operand of products.
using PrecisionTuple = std::tuple<int, bool, bool, int>;

using MatrixTuple = std::tuple<int64_t, int64_t, int64_t, int>;  // start, rows, columns, element

MatrixTuple tuple_of(const cuda::Matrix &m) {
    return {m.start, m.rows, m.columns, static_cast<int>(m.element)};
}

nb::object tuple_of(const std::optional<cuda::LastProduct> &product) {
    if (!product) return nb::none();
    return nb::make_tuple(tuple_of(product->left), tuple_of(product->right), product->transposed);
}

// Slots of a direction are memories of their own, after those of all calls.
cuda::Place slot_place(size_t direction, size_t slot) {
    const size_t number = cuda::kBlockCount + 1 + direction * cuda::kSlotCount + slot;
    return {static_cast<cuda::Block>(number)};
}

// For each step its launch or None, and matrices.
nb::list list_of(const std::vector<cuda::BackwardStep> &steps) {
    nb::list found;
    for (const cuda::BackwardStep &each : steps) {
        std::vector<MatrixTuple> matrices;
        for (const cuda::Matrix &matrix : each.matrices) matrices.push_back(tuple_of(matrix));
        nb::object launch = nb::none();
        if (each.launch) launch = launch_tuple(*each.launch, dict_of(each.launch->kernel.macros));
        found.append(nb::make_tuple(launch, matrices));
    }
    return found;
}

// Returns the steps, for each direction its last products for x, W and R and the gradients of its
// states, and bytes of the workspace.
nb::tuple layer_backward_of(const std::vector<DirectionTuple> &given, int64_t T, int64_t N,
                            const std::array<bool, 5> &wanted, const PrecisionTuple &precision,
                            const cuda::Clusters &clusters, const BackwardPolicy &policy) {
    if (given.empty() || given.size() > 2) throw nb::value_error("Expected one or two directions");
    std::vector<cuda::BackwardDirection> directions;
    for (const auto &[cell, reverse, kinds] : given) {
        cuda::BackwardDirection &each = directions.emplace_back();
        each.cell = cell_of(cell);
        each.reverse = reverse;
        each.weight_kinds = kinds;
        for (size_t slot = 0; slot < cuda::kSlotCount; ++slot)
            each.at[slot] = slot_place(directions.size() - 1, slot);
    }
    const auto [x, W, R, bw, br] = wanted;
    const auto [planes, exact_weights, half, operand] = precision;
    const cuda::LayerBackward made =
        layer_backward(directions, T, N, {x, W, R, bw, br}, {planes, exact_weights, half, operand},
                       clusters, policy);
    nb::list results;
    for (const cuda::LayerBackward::Results &each : made.directions)
        results.append(
            nb::make_tuple(nb::make_tuple(tuple_of(each.x), tuple_of(each.W), tuple_of(each.R)),
                           tuple_of(each.d)));
    return nb::make_tuple(list_of(made.steps), results, made.space);
}

void bind_shapes(nb::module_ &m) {
    nb::class_<BackShape>(m, "BackShape")
        .def("__init__",
             [](BackShape *self, int64_t units, int64_t blocks, int64_t tiles, int64_t split,
                int64_t rows, int64_t planes, int64_t weight_planes) {
                 new (self) BackShape{units, blocks, tiles, split, rows, planes, weight_planes};
             })
        .def_ro("units", &BackShape::units)
        .def_ro("blocks", &BackShape::blocks)
        .def_ro("tiles", &BackShape::tiles)
        .def_ro("split", &BackShape::split)
        .def_ro("rows", &BackShape::rows)
        .def_prop_ro("fits", &BackShape::fits)
        .def("macros", [](const BackShape &shape, bool half, int operand, int directions) {
            return dict_of(shape.macros(half, operand, directions));
        });
    m.def("possible_back_shapes", &cuda::possible_back_shapes);
    m.def("choose_back_shape", &cuda::choose_back_shape);
    nb::class_<BackGridShape>(m, "BackGridShape")
        .def("__init__",
             [](BackGridShape *self, int64_t H, int64_t blocks, int64_t tiles, int64_t columns,
                int64_t warps, int64_t parked, int64_t chunk, int64_t ahead) {
                 new (self) BackGridShape{H, blocks, tiles, columns, warps, parked, chunk, ahead};
             })
        .def_ro("blocks", &BackGridShape::blocks)
        .def_ro("tiles", &BackGridShape::tiles)
        .def_ro("columns", &BackGridShape::columns)
        .def_ro("warps", &BackGridShape::warps)
        .def_ro("parked", &BackGridShape::parked)
        .def_ro("chunk", &BackGridShape::chunk)
        .def_ro("ahead", &BackGridShape::ahead)
        .def_prop_ro("loads", &BackGridShape::loads)
        .def_prop_ro("rows", &BackGridShape::rows)
        .def_prop_ro("groups", &BackGridShape::groups)
        .def_prop_ro("registers", &BackGridShape::registers)
        .def_prop_ro("shared_bytes", &BackGridShape::shared_bytes)
        .def("clusters", &BackGridShape::clusters)
        .def("macros",
             [](const BackGridShape &shape, bool half) { return dict_of(shape.macros(half)); });
    m.def("possible_back_grids", &cuda::possible_back_grids);
    m.def("choose_back_grid", &cuda::choose_back_grid);
    nb::class_<DerivativesShape>(m, "DerivativesShape")
        .def("__init__",
             [](DerivativesShape *self, int64_t unit_warps, int64_t groups,
                const std::pair<int64_t, int64_t> &padded, int64_t table_bytes) {
                 new (self) DerivativesShape{unit_warps, groups, padded, table_bytes};
             })
        .def_ro("unit_warps", &DerivativesShape::unit_warps)
        .def_ro("groups", &DerivativesShape::groups)
        .def_prop_ro("macros",
                     [](const DerivativesShape &shape) { return dict_of(shape.macros()); })
        .def("grid", [](const DerivativesShape &shape, int64_t H, int64_t rows, int64_t directions,
                        int64_t processors) {
            const auto [grid, share] = shape.grid(H, rows, directions, processors);
            return nb::make_tuple(grid_tuple(grid), share);
        });
    m.def("choose_derivatives", &cuda::choose_derivatives);
}

}  // namespace

void bind_gpu_backward(nb::module_ &m) {
    bind_shapes(m);
    nb::class_<BackwardPolicy>(m, "BackwardPolicy")
        .def(nb::init<>())
        .def_rw("product_bytes", &BackwardPolicy::product_bytes)
        .def_rw("codes_blocks", &BackwardPolicy::codes_blocks)
        .def_rw("in_clusters", &BackwardPolicy::in_clusters)
        .def_rw("from_bytes", &BackwardPolicy::from_bytes)
        .def_rw("derivatives", &BackwardPolicy::derivatives, nb::arg().none());
    m.def("layer_backward_of", &layer_backward_of);
}

}  // namespace quant_gru
