// The Python module: what runs on the CPU, and launches on a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/cpu_module.hpp"
#include "bindings/cuda_backward.hpp"
#include "bindings/cuda_call.hpp"
#include "bindings/prepared_gpu_call.hpp"
#include "bindings/prepared_step.hpp"
#include "bindings/quiet.hpp"
#include "kernel_runtime/native/launch_list.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

// Addresses of an input's strides and of its flag, the flag's width, whether it may be set.
using InputNumbers = std::tuple<uintptr_t, uintptr_t, uintptr_t, int, bool>;
// T, N, C, bytes of space, bytes of codes.
using CallNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

void make_call(Call *self, Launches &launches, const std::vector<Fields *> &fields,
               const std::vector<InputNumbers> &inputs, const CallNumbers &sizes,
               const std::vector<nb::tuple> &makers, nb::handle tensor, int64_t device,
               const nb::tuple &stream, nb::object fail, nb::object keep) {
    std::vector<Call::Input> found;
    for (const auto &[step, next, fours, width, may] : inputs)
        found.push_back({step, next, fours, width, may});
    const auto &[T, N, C, space, codes] = sizes;
    std::vector<Maker> made;
    for (const nb::tuple &each : makers) made.emplace_back(each[0], nb::cast<nb::tuple>(each[1]));
    new (self)
        Call(launches, fields, found, {T, N, C, space, codes}, std::move(made),
             Tensors(tensor, device), CurrentStream(stream), std::move(fail), std::move(keep));
}

nb::object run_call(Call &call, const nb::object &x, const nb::object &h0,
                    const nb::object &lengths) {
    auto given = [](const nb::object &o) { return o.is_none() ? nullptr : o.ptr(); };
    Call::Given all{x.ptr(), given(h0), given(lengths), {}, {}, false};
    const Tensors &tensors = call.tensors();
    if (!tensors.view(all.x, all.x_view) || (all.h0 && !tensors.view(all.h0, all.h0_view)))
        throw nb::value_error("Expected x and h0 to be float32 of three dimensions on the device");
    return call.run(all, nullptr);
}

// Device, bytes of memory, offset of dh0, bytes to keep, address of zeros.
using RepeatedNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, uintptr_t>;
using Dimensions = std::vector<int64_t>;

void make_repeated(Repeated *self, Launches &launches, const RepeatedNumbers &sizes,
                   const std::vector<std::tuple<Dimensions, Dimensions>> &layouts,
                   const std::vector<nb::object> &makers, const nb::tuple &torch, nb::object fail,
                   nb::object keep) {
    const auto &[device, space, dh0, most, zero] = sizes;
    std::vector<Repeated::Layout> found;
    for (const auto &[shape, strides] : layouts) found.push_back(Repeated::Layout{shape, strides});
    new (self) Repeated(launches, {device, space, dh0, most, zero}, std::move(found), makers, torch,
                        std::move(fail), std::move(keep));
}

// Index of the device, states, C, H.
using QuickNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t>;

void make_quick_gpu(QuickGPU *self, const QuickNumbers &sizes, const nb::sequence &weights,
                    nb::object steps, nb::tuple torch, int64_t most) {
    const auto &[device, states, C, H] = sizes;
    new (self) QuickGPU({device, states, C, H}, weights, std::move(steps), std::move(torch), most);
}

void make_step(Step *self, const QuickNumbers &sizes, const nb::sequence &weights,
               const nb::tuple &torch) {
    const auto &[device, states, C, H] = sizes;
    new (self) Step({device, states, C, H}, weights, torch);
}

}  // namespace
}  // namespace quant_gru

NB_MODULE(_native, m) {
    using namespace quant_gru;
    // plans that are still in use at the interpreter's end are no leak
    nb::set_leak_warnings(false);
    bind_cpu(m);
    nb::class_<Fields>(m, "Fields")
        .def(nb::init<>())
        .def("add", &Fields::add)
        .def("move", &Fields::move);
    // a queue that is full may wait for a host function that wants the interpreter's lock
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Driver>(m, "Driver")
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t>())
        .def(
            "launch",
            [](const Driver &driver, uintptr_t config, uintptr_t function, uintptr_t parameters) {
                return driver.in_context(
                    [&] { return driver.launch(config, function, parameters); });
            },
            Unlocked());
    nb::class_<Launches>(m, "Launches")
        .def(nb::init<const Driver &>(), nb::keep_alive<1, 2>())
        .def("add", &Launches::add)
        .def("start", &Launches::start, Unlocked())
        .def("follow", &Launches::follow, nb::keep_alive<1, 2>())
        .def("start_at", &Launches::start_at, Unlocked());
    nb::class_<Quiet>(m, "Quiet")
        .def(nb::init<nb::tuple, nb::tuple, nb::tuple, nb::str, nb::tuple, nb::dict, nb::tuple,
                      nb::tuple>())
        .def("is_", &Quiet::is);
    nb::class_<Call>(m, "Call")
        .def("__init__", &make_call)
        .def("run", &run_call, nb::arg(), nb::arg().none(), nb::arg().none());
    nb::class_<QuickGPU>(m, "QuickGPU")
        .def("__init__", &make_quick_gpu, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
             nb::arg())
        .def("add", &QuickGPU::add)
        .def("run", &QuickGPU::run, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg());
    nb::class_<Repeated>(m, "Repeated")
        .def("__init__", &make_repeated)
        .def("run", &Repeated::run, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none())
        .def("forget", &Repeated::forget);
    nb::class_<Step>(m, "Step")
        .def("__init__", &make_step)
        .def("holds", &Step::holds)
        .def("takes", &Step::takes, nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}
