#include "bindings/gpu_plans.hpp"

#include <nanobind/operators.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/plan_from_dict.hpp"
#include "cuda/host/plans/gate_numbers.hpp"
#include "cuda/host/plans/planner.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

using cuda::Clusters;
using cuda::Form;
using cuda::GateNumbers;
using cuda::Gates;
using cuda::RecurrenceShape;

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
               bool saturated, bool powers) {
    Form form;
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

// Macros with numbers as such.
nb::dict dict_of(const cuda::Macros &macros) {
    nb::dict found;
    for (const auto &[name, value] : macros) {
        const bool is_number = value.find_first_not_of("0123456789") == std::string::npos;
        found[name.c_str()] = is_number ? nb::cast(std::stoll(value)) : nb::cast(value);
    }
    return found;
}

// Source, function, macros, blocks in x and y, threads, cluster, shared bytes, early.
nb::tuple tuple_of(const cuda::Kernel &kernel, const cuda::Grid &grid) {
    return nb::make_tuple(kernel.source, kernel.function, dict_of(kernel.macros),
                          nb::make_tuple(grid.x, grid.y), grid.threads, grid.cluster,
                          grid.shared_bytes, grid.early);
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
             nb::arg("saturated") = false, nb::arg("powers") = false)
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
        .def_prop_ro("recurrence", &Form::recurrence, nb::rv_policy::copy)
        .def_prop_ro("in_int32", &Form::in_int32)
        .def_prop_ro("products", [](const Form &form) { return dict_of(form.products()); })
        .def(nb::self == nb::self);
    nb::class_<GateNumbers>(m, "GateNumbers")
        .def(
            "__init__",
            [](GateNumbers *self, const nb::dict &numbers) {
                new (self) GateNumbers(gate_part(numbers));
            },
            nb::keep_alive<1, 2>())
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
    m.def("joint_form",
          [](const Directions &directions) { return cuda::joint_form(directions_of(directions)); });
    m.def("compressed",
          [](const std::vector<int64_t> &outputs) { return bytes_of(cuda::compressed(outputs)); });
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
        .def_prop_ro("elements", &RecurrenceShape::elements)
        .def("tiles", &RecurrenceShape::tiles)
        .def("strips", &RecurrenceShape::strips)
        .def("projected_words", &RecurrenceShape::projected_words)
        .def("shared_bytes", &RecurrenceShape::shared_bytes)
        .def("macros", [](const RecurrenceShape &shape, const Form &form, int64_t H,
                          int directions) { return dict_of(shape.macros(form, H, directions)); })
        .def("fits", &RecurrenceShape::fits, nb::arg(), nb::arg("clusters") = true)
        .def("step_time", &RecurrenceShape::step_time)
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
            const auto [kernel, grid] = cuda::recurrence_layout(shape, form, H, N, directions, use);
            return tuple_of(kernel, grid);
        },
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
        nb::arg(), nb::arg());
}

}  // namespace quant_gru
