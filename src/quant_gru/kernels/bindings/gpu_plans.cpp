#include "bindings/gpu_plans.hpp"

#include <nanobind/operators.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/gpu_numbers.hpp"
#include "bindings/plan_from_dict.hpp"
#include "cuda/host/plans/gate_numbers.hpp"
#include "cuda/host/plans/planner.hpp"
#include "cuda/host/plans/projection.hpp"

namespace nb = nanobind;

namespace quant_gru {

nb::dict dict_of(const cuda::Macros &macros) {
    nb::dict found;
    for (const auto &[name, value] : macros) {
        const bool is_number = value.find_first_not_of("0123456789") == std::string::npos;
        found[name.c_str()] = is_number ? nb::cast(std::stoll(value)) : nb::cast(value);
    }
    return found;
}

nb::tuple grid_tuple(const cuda::Grid &grid) {
    return nb::make_tuple(nb::make_tuple(grid.x, grid.y), grid.threads, grid.cluster,
                          grid.shared_bytes, grid.early, grid.together);
}

namespace {

using cuda::Chip;
using cuda::Clusters;
using cuda::Epilogue;
using cuda::Form;
using cuda::GateNumbers;
using cuda::Gates;
using cuda::Overlap;
using cuda::Projection;
using cuda::ProjectionPolicy;
using cuda::ProjectionSize;
using cuda::RealBlocks;
using cuda::RecurrenceShape;
using cuda::Selection;
using cuda::Tile;
using cuda::TiledReals;
using cuda::Warpgroups;
using cuda::WeightStationary;

using TableTuple = std::tuple<int, int, int>;
using Fused = std::tuple<bool, bool, bool>;

bool is_float(const std::string &real) {
    if (real != "float" && real != "double")
        throw nb::value_error(("Expected float or double, got " + real).c_str());
    return real == "float";
}

const char *real_of(const Gates &gates) { return gates.in_float ? "float" : "double"; }

TableTuple tables_of(const Gates &gates) {
    return {gates.tables[0], gates.tables[1], gates.tables[2]};
}

Gates make_gates(const std::string &real, const TableTuple &tables, int table_bytes) {
    const auto [z, r, g] = tables;
    return {is_float(real), {z, r, g}, table_bytes};
}

void make_form(Form *self, bool narrow, const std::string &real, bool words, int weight_bytes,
               int state_bytes, bool wide_input, int out_bytes, const TableTuple &tables,
               int table_bytes, const Fused &fused, bool zoneout, const std::optional<Gates> &own,
               bool saturated, bool powers, int rounding, int rounding_input) {
    Form form;
    form.rules = {rounding, rounding_input};
    form.narrow = narrow;
    form.gates = make_gates(real, tables, table_bytes);
    form.own = own;
    form.words = words;
    form.weight_bytes = weight_bytes;
    form.state_bytes = state_bytes;
    form.wide_input = wide_input;
    form.out_bytes = out_bytes;
    std::tie(form.rRh, form.old_contrib, form.new_contrib) = fused;
    form.zoneout = zoneout;
    form.saturated = saturated;
    form.powers = powers;
    new (self) Form(form);
}

// Source, function, macros, and the grid.
nb::tuple tuple_of(const cuda::Layout &layout) {
    const cuda::Kernel &kernel = layout.kernel;
    return nb::make_tuple(kernel.source, kernel.function, dict_of(kernel.macros),
                          grid_tuple(layout.grid));
}

template <class Value>
nb::object bytes_of(const std::vector<Value> &values) {
    if (values.empty()) return nb::none();
    return nb::bytes(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(Value));
}

template <class Struct>
nb::bytes bytes_of(const Struct &record) {
    return nb::bytes(reinterpret_cast<const char *>(&record), sizeof record);
}

// Addresses of one entry per code, lines, bounds and coefficients.
using Places = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

nb::bytes cell_of(const GateNumbers &gates, const std::string &real,
                  const std::vector<Places> &places) {
    std::array<cuda::TableAddresses, 3> found{};
    for (size_t i = 0; i < 3; ++i) {
        const auto [direct, lines, bounds, coefficients] = places.at(i);
        found[i] = {direct, lines, bounds, coefficients};
    }
    return is_float(real) ? bytes_of(gates.cell<float>(found))
                          : bytes_of(gates.cell<double>(found));
}

Form form_of(const GateNumbers &gates, int C, int H, int W_bits, int R_bits, bool large_shared) {
    CellNumbers numbers = gates.numbers;
    numbers.H = numbers.R.inputs = H;
    numbers.W.inputs = C;
    numbers.W.weight_bits = W_bits;
    numbers.R.weight_bits = R_bits;
    return cuda::form_of(numbers, gates.tables, gates.saturated.has_value(), large_shared);
}

using Directions = std::vector<std::pair<Form, const GateNumbers *>>;

std::vector<cuda::DirectionForm> directions_of(const Directions &given) {
    std::vector<cuda::DirectionForm> found;
    for (const auto &[form, gates] : given) found.push_back({form, gates->tables});
    return found;
}

void bind_forms(nb::module_ &m) {
    nb::class_<Gates>(m, "Gates")
        .def("__init__", [](Gates *self, const std::string &real, const TableTuple &tables,
                            int bytes) { new (self) Gates(make_gates(real, tables, bytes)); })
        .def_prop_ro("real", &real_of)
        .def_prop_ro("tables", &tables_of)
        .def_ro("table_bytes", &Gates::table_bytes)
        .def(nb::self == nb::self);
    nb::class_<Form>(m, "Form")
        .def("__init__", &make_form, nb::arg("narrow"), nb::arg("real"), nb::arg("words"),
             nb::arg("weight_bytes"), nb::arg("state_bytes"), nb::arg("wide_input"),
             nb::arg("out_bytes"), nb::arg("tables"), nb::arg("table_bytes"), nb::arg("fused"),
             nb::arg("zoneout") = false, nb::arg("own").none() = nb::none(),
             nb::arg("saturated") = false, nb::arg("powers") = false, nb::arg("rounding") = 0,
             nb::arg("rounding_input") = 0)
        .def_ro("narrow", &Form::narrow)
        .def_prop_ro("real", [](const Form &form) { return real_of(form.gates); })
        .def_ro("words", &Form::words)
        .def_ro("weight_bytes", &Form::weight_bytes)
        .def_ro("state_bytes", &Form::state_bytes)
        .def_ro("wide_input", &Form::wide_input)
        .def_ro("out_bytes", &Form::out_bytes)
        .def_prop_ro("tables", [](const Form &form) { return tables_of(form.gates); })
        .def_prop_ro("table_bytes", [](const Form &form) { return form.gates.table_bytes; })
        .def_prop_ro(
            "fused",
            [](const Form &form) { return Fused(form.rRh, form.old_contrib, form.new_contrib); })
        .def_ro("zoneout", &Form::zoneout)
        .def_ro("own", &Form::own)
        .def_ro("saturated", &Form::saturated)
        .def_ro("powers", &Form::powers)
        .def_prop_ro("rounding", [](const Form &form) { return form.rules.sums; })
        .def_prop_ro("rounding_input", [](const Form &form) { return form.rules.input; })
        .def_prop_ro("recurrence", &Form::recurrence, nb::rv_policy::copy)
        .def_prop_ro("in_int32", &Form::in_int32)
        .def_prop_ro("products", [](const Form &form) { return dict_of(form.products()); })
        .def(nb::self == nb::self);
    nb::class_<GateNumbers>(m, "GateNumbers")
        .def("__init__",
             [](GateNumbers *self, const nb::dict &numbers) {
                 new (self) GateNumbers(gate_part(numbers));
                 auto &[z, r, g] = self->numbers.tables;
                 // the arrays belong to the dict, and are not needed any more
                 for (TableNumbers *each : {&z, &r, &g})
                     each->bounds = each->coefficients = nullptr;
             })
        .def("tables",
             [](const GateNumbers &gates) {
                 nb::list found;
                 for (const cuda::GateTable &each : gates.tables)
                     found.append(nb::make_tuple(bytes_of(each.direct), bytes_of(each.lines)));
                 return found;
             })
        .def("cell", &cell_of)
        .def("saturated",
             [](const GateNumbers &gates) -> nb::object {
                 return gates.saturated ? bytes_of(*gates.saturated) : nb::object(nb::none());
             })
        .def("form", &form_of);
    m.def("compressed",
          [](const std::vector<int64_t> &outputs) { return bytes_of(cuda::compressed(outputs)); });
}

void bind_blocks(nb::module_ &m) {
    nb::class_<Epilogue>(m, "Epilogue")
        .def(
            "__init__",
            [](Epilogue *self, int planes, int codes, bool powers, bool longs) {
                new (self) Epilogue{planes, codes, powers, longs};
            },
            nb::arg("planes"), nb::arg("codes") = 0, nb::arg("powers") = false,
            nb::arg("longs") = false)
        .def_ro("planes", &Epilogue::planes)
        .def(nb::self == nb::self);
    nb::class_<Tile>(m, "Tile")
        .def(nb::init<int64_t, int64_t, int64_t>())
        .def("macros", [](const Tile &t, const Epilogue &e) { return dict_of(t.macros(e)); })
        .def("launch", [](const Tile &t, int64_t units, int64_t rows,
                          const Epilogue &e) { return tuple_of(t.layout(units, rows, e)); })
        .def(nb::self == nb::self);
    nb::class_<WeightStationary>(m, "WeightStationary")
        .def("__init__",
             [](WeightStationary *self, int64_t unit_warps, int64_t groups, int64_t columns,
                int64_t stages, int64_t blocks) {
                 new (self) WeightStationary{unit_warps, groups, columns, stages, blocks};
             })
        .def("across", &WeightStationary::across)
        .def("macros",
             [](const WeightStationary &b, const Epilogue &e) { return dict_of(b.macros(e)); })
        .def("launch",
             [](const WeightStationary &b, int64_t units, int64_t rows, int64_t padded,
                int64_t processors, const Epilogue &e) {
                 const auto [grid, share] = b.grid(units, rows, padded, e.planes, processors);
                 return nb::make_tuple(tuple_of({b.kernel(e), grid}), share);
             })
        .def(nb::self == nb::self);
    nb::class_<TiledReals>(m, "TiledReals")
        .def(
            "__init__",
            [](TiledReals *self, int64_t unit_warps, int64_t row_warps, int64_t columns,
               int64_t stages, int64_t blocks, int64_t parts, int64_t depth) {
                new (self) TiledReals{unit_warps, row_warps, columns, stages, blocks, parts, depth};
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("depth") = 64)
        .def_ro("parts", &TiledReals::parts)
        .def_ro("blocks", &TiledReals::blocks)
        .def_prop_ro("units", &TiledReals::units)
        .def_prop_ro("rows", &TiledReals::rows)
        .def_prop_ro("threads", &TiledReals::threads)
        .def("shared_bytes", &TiledReals::shared_bytes)
        .def(nb::self == nb::self);
    nb::class_<Warpgroups>(m, "Warpgroups")
        .def(
            "__init__",
            [](Warpgroups *self, int64_t columns, int64_t parts, int64_t units, int64_t padded,
               int planes) { new (self) Warpgroups{columns, parts, units, padded, planes}; },
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg("planes") = 1)
        .def_ro("columns", &Warpgroups::columns)
        .def_ro("parts", &Warpgroups::parts)
        .def_ro("planes", &Warpgroups::planes)
        .def_prop_ro("rows", &Warpgroups::rows)
        .def_prop_ro("group_tiles", &Warpgroups::group_tiles)
        .def_prop_ro("panels", &Warpgroups::panels)
        .def_prop_ro("stages", &Warpgroups::stages)
        .def_prop_ro("shared_bytes", &Warpgroups::shared_bytes)
        .def(nb::self == nb::self);
    m.def("blocks_of", &cuda::blocks_of);
    m.def("real_macros", [](const RealBlocks &block, const Epilogue &e, int64_t strip,
                            int64_t features, bool exact, bool whole) {
        return dict_of(cuda::macros_of(block, e, {strip, features, exact, whole}));
    });
    m.def("choose_tile", &cuda::choose_tile);
    m.def("choose_tiled", &cuda::choose_tiled, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
          nb::arg(), nb::arg("alone") = true);
    m.def("choose_warpgroups",
          [](int64_t units, int64_t rows, int64_t padded, int planes, int64_t processors) {
              return cuda::choose_warpgroups(units, rows, padded, planes, processors);
          });
}

void bind_selection(nb::module_ &m) {
    nb::class_<Chip>(m, "Chip").def("__init__",
                                    [](Chip *self, std::string arch, Clusters clusters) {
                                        new (self) Chip{std::move(arch), std::move(clusters)};
                                    });
    nb::class_<ProjectionSize>(m, "ProjectionSize")
        .def("__init__",
             [](ProjectionSize *self, int64_t T, int64_t N, int64_t features, int W_bits,
                const QuantizerTuple &x, const RecurrenceShape &shape) {
                 const QuantizerNumbers q = quantizer_numbers(x);
                 new (self) ProjectionSize{
                     T, N, features, cuda::planes_of(q.bits), W_bits <= 8, cuda::divides(q), shape};
             })
        .def_prop_ro("projects_bytes", &ProjectionSize::projects_bytes);
    nb::class_<ProjectionPolicy>(m, "ProjectionPolicy")
        .def(nb::init<>())
        // copies, as writes do not change what was read
        .def_rw("stationary", &ProjectionPolicy::stationary, nb::rv_policy::copy)
        .def_rw("stationary_rows", &ProjectionPolicy::stationary_rows)
        .def_rw("stationary_weights", &ProjectionPolicy::stationary_weights)
        .def_rw("by_steps", &ProjectionPolicy::by_steps)
        .def_rw("overlaps", &ProjectionPolicy::overlaps)
        .def_rw("overlap_steps", &ProjectionPolicy::overlap_steps)
        .def_rw("overlap_work", &ProjectionPolicy::overlap_work)
        .def_rw("overlap_share", &ProjectionPolicy::overlap_share)
        .def_rw("group_rows", &ProjectionPolicy::group_rows)
        .def_rw("group_work", &ProjectionPolicy::group_work)
        .def_rw("reads_reals", &ProjectionPolicy::reads_reals)
        .def_rw("reals", &ProjectionPolicy::reals, nb::arg().none());
    nb::class_<Overlap>(m, "Overlap")
        .def(
            "__init__",
            [](Overlap *self, const WeightStationary &block, int64_t cluster, int64_t clusters,
               int64_t chunk) { new (self) Overlap{block, cluster, clusters, chunk}; },
            nb::arg(), nb::arg(), nb::arg(), nb::arg("chunk") = 8)
        .def_ro("block", &Overlap::block)
        .def_ro("cluster", &Overlap::cluster)
        .def_ro("clusters", &Overlap::clusters)
        .def_ro("chunk", &Overlap::chunk)
        .def("chunks", &Overlap::chunks)
        .def("strips", &Overlap::strips)
        .def("grid", [](const Overlap &o, int64_t units, int64_t padded,
                        int planes) { return grid_tuple(o.grid(units, padded, planes)); })
        .def(nb::self == nb::self);
    nb::enum_<Projection>(m, "Method")
        .value("REALS_FEW_ROWS", Projection::reals_few)
        .value("REALS_TILED", Projection::reals_tiled)
        .value("CODES_FEW_ROWS", Projection::codes_few)
        .value("CODES_TILED", Projection::bytes)
        .value("GEMM", Projection::products);
    nb::class_<Selection>(m, "Selection")
        .def_ro("method", &Selection::method)
        .def_ro("reals", &Selection::reals)
        .def_ro("codes", &Selection::codes)
        .def_prop_ro("reads_reals", [](const Selection &s) { return cuda::reads_reals(s.method); });
    m.def("epilogue_of", [](const GateNumbers &gates, int C) {
        CellNumbers numbers = gates.numbers;
        numbers.W.inputs = C;
        return cuda::epilogue_of(numbers);
    });
    m.def("division_of", [](const QuantizerTuple &x) {
        return bytes_of(cuda::division_of(quantizer_numbers(x)));
    });
    m.def("divides", [](const QuantizerTuple &x) { return cuda::divides(quantizer_numbers(x)); });
    m.def("weight_stationary", &cuda::weight_stationary);
    m.def("choose_reals", &cuda::choose_reals);
    m.def("overlap_of", &cuda::overlap_of);
    m.def("select_projection", &cuda::select_projection, nb::arg(), nb::arg(), nb::arg(),
          nb::arg().none(), nb::arg());
}

}  // namespace

void bind_gpu_plans(nb::module_ &m) {
    bind_forms(m);
    nb::class_<RecurrenceShape>(m, "Shape")
        .def_ro("features", &RecurrenceShape::features)
        .def_ro("units", &RecurrenceShape::units)
        .def_ro("blocks", &RecurrenceShape::blocks)
        .def_ro("split", &RecurrenceShape::split)
        .def_ro("spread", &RecurrenceShape::spread)
        .def_ro("rows", &RecurrenceShape::rows)
        .def_prop_ro("threads", &RecurrenceShape::threads)
        .def_prop_ro("strip", &RecurrenceShape::strip)
        .def("tiles", &RecurrenceShape::tiles)
        .def("strips", &RecurrenceShape::strips)
        .def("projected_words", &RecurrenceShape::projected_words)
        .def("shared_bytes", &RecurrenceShape::shared_bytes)
        .def("macros", [](const RecurrenceShape &shape, const Form &form, int64_t H,
                          int directions) { return dict_of(shape.macros(form, H, directions)); })
        .def("fits", &RecurrenceShape::fits, nb::arg(), nb::arg("clusters") = true)
        .def("step_time", &RecurrenceShape::step_time)
        .def("passes", &RecurrenceShape::passes)
        .def("resident", &RecurrenceShape::resident)
        .def("waves", &RecurrenceShape::waves)
        .def("bulk", &RecurrenceShape::bulk)
        .def("ring", &RecurrenceShape::ring)
        .def(nb::self == nb::self);
    m.def("make_shape", &cuda::make_shape);
    m.def("possible_shapes", &cuda::possible_shapes);
    m.def("choose_shape", &cuda::choose_shape);
    m.def("time_of", &cuda::time_of);
    m.def("starts_early", &cuda::starts_early);
    m.def("shared_form",
          [](const Directions &directions, int64_t H, int64_t N, const Clusters &clusters) {
              return cuda::shared_form(directions_of(directions), H, N, clusters);
          });
    m.def(
        "recurrence_layout",
        [](const RecurrenceShape &shape, const Form &form, int64_t H, int64_t N, int directions,
           bool held, const std::optional<std::tuple<bool, bool>> &outputs, bool early,
           int64_t chunk) {
            cuda::RecurrenceUse use;
            if (outputs)
                use.states = cuda::StateOutputs{std::get<0>(*outputs), std::get<1>(*outputs)};
            use.held = held;
            use.early = early;
            use.chunk = chunk;
            return tuple_of(cuda::recurrence_layout(shape, form, H, N, directions, use));
        },
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg(), nb::arg());
    bind_blocks(m);
    bind_selection(m);
}

}  // namespace quant_gru
