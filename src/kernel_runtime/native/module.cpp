// The Python module: arguments that follow addresses, and launches that are started one after the
// other.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "kernel_runtime/native/launch_list.hpp"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    using namespace kernel_runtime;
    // launches that are still in use at the interpreter's end are no leak
    nb::set_leak_warnings(false);
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
}
