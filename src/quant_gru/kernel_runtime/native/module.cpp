// The Python module: prepared launches and their arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "kernel_runtime/native/launch_list.hpp"
#include "kernel_runtime/native/tensor_launch.hpp"

namespace nb = nanobind;

namespace kernel_runtime {
namespace {

// The fields of Grid in Python: blocks in x and y, threads, cluster, shared bytes, together, early.
using GridTuple =
    std::tuple<std::pair<unsigned, unsigned>, unsigned, unsigned, unsigned, bool, bool>;

cuda::Grid grid_of(const GridTuple &given) {
    const auto &[blocks, threads, cluster, shared_bytes, together, early] = given;
    return {blocks.first, blocks.second, threads, cluster, shared_bytes, early, together};
}

}  // namespace
}  // namespace kernel_runtime

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
        .def(nb::init<uintptr_t, uintptr_t, uintptr_t, uintptr_t, std::vector<uintptr_t>>(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = std::vector<uintptr_t>())
        .def(
            "launch",
            [](const Driver &driver, uintptr_t function, const GridTuple &grid, uintptr_t argument,
               uintptr_t stream) {
                const cuda::Configured configured(grid_of(grid),
                                                  reinterpret_cast<cuda::Stream>(stream));
                return driver.in_context(
                    [&] { return driver.launch(configured.config, function, argument); });
            },
            Unlocked());
    nb::class_<Launches>(m, "Launches")
        .def(nb::init<Driver &>(), nb::keep_alive<1, 2>())
        .def("add", [](Launches &launches, uintptr_t function, const GridTuple &grid,
                       uintptr_t argument) { launches.add(function, grid_of(grid), argument); })
        .def("add_product",
             [](Launches &launches, uintptr_t function, uintptr_t product) {
                 launches.add_product(function, reinterpret_cast<Product *>(product));
             })
        .def("start", nb::overload_cast<uintptr_t>(&Launches::start), Unlocked())
        .def("start", nb::overload_cast<uintptr_t, const RecordedGraphs::Key &>(&Launches::start),
             Unlocked());
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
