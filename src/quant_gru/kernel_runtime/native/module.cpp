// The Python module: prepared launches and their arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "kernel_runtime/native/launch_list.hpp"
#include "kernel_runtime/native/tensor_launch.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    using namespace kernel_runtime;
    // Launches that are still in use when the interpreter exits are not leaks.
    nb::set_leak_warnings(false);
    nb::class_<Fields>(m, "Fields")
        .def(nb::init<>())
        .def("add", &Fields::add)
        .def("move", &Fields::move);
    // A full launch queue may wait for a host function that needs the GIL.
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
    nb::class_<TensorLaunch>(m, "TensorLaunch")
        .def(
            "__init__",
            [](TensorLaunch *self, Launches &launches, const std::vector<uintptr_t> &fields,
               nb::handle tensor, int64_t device, nb::object stream, nb::object fail,
               nb::object keep) {
                new (self) TensorLaunch(launches, fields, Tensors(tensor, device),
                                        std::move(stream), std::move(fail), std::move(keep));
            },
            nb::keep_alive<1, 2>())
        .def("__call__", &TensorLaunch::start);
}
