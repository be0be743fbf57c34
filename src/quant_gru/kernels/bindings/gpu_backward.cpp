#include "bindings/gpu_backward.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gpu_numbers.hpp"
#include "bindings/tensor_cell.hpp"
#include "cuda/host/gru_backward.hpp"

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

nb::tuple tuple_of(const cuda::LastProduct &product) {
    return nb::make_tuple(tuple_of(product.left), tuple_of(product.right), product.transposed);
}

// Slots of a direction are memories of their own, after those of all calls. The results of last
// products for x, W and R of each direction follow them.
size_t slot_number(size_t direction, size_t slot) {
    return cuda::kBlockCount + 1 + direction * cuda::kSlotCount + slot;
}
size_t result_number(size_t directions, size_t direction, size_t which) {
    return slot_number(directions, 0) + 3 * direction + which;
}

nb::object tuple_of(const std::optional<cuda::Launch> &launch) {
    if (!launch) return nb::none();
    return launch_tuple(*launch, dict_of(launch->kernel.macros));
}

std::vector<MatrixTuple> tuples_of(const std::vector<cuda::Matrix> &matrices) {
    std::vector<MatrixTuple> found;
    for (const cuda::Matrix &each : matrices) found.push_back(tuple_of(each));
    return found;
}

// Steps: a launch or None, matrices, and products with the memories and offsets of their results.
// Returns the steps, the gradients of the states of each direction, and bytes of the workspace.
nb::tuple layer_backward_of(const std::vector<DirectionTuple> &given, int64_t T, int64_t N,
                            const std::array<bool, 5> &wanted, const PrecisionTuple &precision,
                            const cuda::Clusters &clusters, const BackwardPolicy &policy) {
    if (given.empty() || given.size() > 2) throw nb::value_error("Expected one or two directions");
    std::vector<std::unique_ptr<cuda::Cell>> cells;
    std::vector<cuda::BackwardDirection> directions;
    for (const auto &[cell, reverse, kinds] : given) {
        const size_t d = directions.size();
        cuda::BackwardDirection &each = directions.emplace_back();
        each.cell = cells.emplace_back(cell_of(cell)).get();
        each.reverse = reverse;
        each.weight_kinds = kinds;
        for (size_t slot = 0; slot < cuda::kSlotCount; ++slot)
            each.at[slot] = {static_cast<cuda::Block>(slot_number(d, slot))};
    }
    const auto [x, W, R, bw, br] = wanted;
    const auto [planes, exact_weights, half, operand] = precision;
    const cuda::LayerBackward made =
        layer_backward(directions, T, N, {x, W, R, bw, br}, {planes, exact_weights, half, operand},
                       clusters, policy);
    nb::list steps, products, states;
    for (const cuda::BackwardStep &each : made.steps)
        steps.append(
            nb::make_tuple(tuple_of(each.launch), tuples_of(each.matrices), nb::make_tuple()));
    for (const cuda::LayerBackward::Results &each : made.directions) {
        const std::optional<cuda::LastProduct> *const all[] = {&each.x, &each.W, &each.R};
        for (size_t i = 0; i < 3; ++i)
            if (*all[i])
                products.append(nb::make_tuple(
                    tuple_of(**all[i]),
                    nb::make_tuple(result_number(given.size(), nb::len(states), i), 0)));
        states.append(tuple_of(each.d));
    }
    if (nb::len(products)) steps.append(nb::make_tuple(nb::none(), nb::make_tuple(), products));
    return nb::make_tuple(steps, states, made.space);
}

// A cell, the containers of the codes of W and R, and addresses of the slots from W to kh.
using GRUCellTuple = std::tuple<CellTuple, std::array<int64_t, 2>, std::array<cuda::Address, 10>>;

// Shape, strides and dtype of real values, of packed rows without steps; no shape if absent.
using LayoutTuple = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int>;

std::optional<cuda::RealLayout> layout_of(const LayoutTuple &given) {
    const auto &[shape, strides, kind] = given;
    if (shape.empty()) return {};
    const size_t rows = shape.size() - 2;
    return cuda::RealLayout{kind, rows ? strides[0] : 0, strides[rows], strides[rows + 1]};
}

// T and N, and whether rows are packed; layouts of x, h0 and the
// gradients of the output and the last states; dtype of gradients of weights, and the wanted ones.
using GRUFormTuple =
    std::tuple<int64_t, int64_t, bool, std::array<LayoutTuple, 4>, int, std::vector<bool>>;

// A launch refers to tensors of the backward instead of memories.
nb::object launch_of_gru(const std::optional<cuda::Launch> &given) {
    if (!given) return nb::none();
    cuda::Launch launch = *given;
    for (cuda::Field &each : launch.fields)
        each.place.block = static_cast<cuda::Block>(tensor_of(each.place));
    return tuple_of(launch);
}

nb::list list_of(const std::vector<cuda::GradientProduct> &products) {
    nb::list found;
    for (const auto &[product, result] : products)
        found.append(
            nb::make_tuple(tuple_of(product), nb::make_tuple(tensor_of(result), result.offset)));
    return found;
}

// Returns the steps: a launch or None, matrices, and products; and bytes of the workspace.
nb::tuple gru_backward_of(const std::vector<GRUCellTuple> &given, int64_t directions,
                          const GRUFormTuple &form, cuda::Address zero,
                          const PrecisionTuple &precision, const cuda::Clusters &clusters,
                          const BackwardPolicy &policy) {
    std::vector<cuda::GRUCell> cells;
    for (const auto &[cell, kinds, weights] : given)
        cells.push_back({cell_of(cell), kinds, weights});
    const auto &[T, N, is_packed, layouts, weights, wanted] = form;
    const auto &[x, h0, grad_y, grad_last] = layouts;
    const cuda::GRUBackwardForm numbers{T,
                                        N,
                                        is_packed,
                                        layout_of(x).value(),
                                        layout_of(h0),
                                        layout_of(grad_y),
                                        layout_of(grad_last),
                                        weights,
                                        wanted};
    const auto [planes, exact_weights, half, operand] = precision;
    const cuda::GRUBackward made =
        gru_backward(std::move(cells), directions, numbers, zero,
                     {planes, exact_weights, half, operand}, clusters, policy);
    nb::list steps;
    for (const cuda::GRUBackwardStep &each : made.steps)
        steps.append(nb::make_tuple(launch_of_gru(each.launch), tuples_of(each.matrices),
                                    list_of(each.products)));
    return nb::make_tuple(steps, made.space);
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
    m.def("gru_backward_of", &gru_backward_of);
}

}  // namespace quant_gru
