// The Python module: the compiler and its cache, GPUs, prepared launches and their arguments.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernel_runtime/native/compiler.hpp"
#include "kernel_runtime/native/cubin_cache.hpp"
#include "kernel_runtime/native/device.hpp"
#include "kernel_runtime/native/embedder.hpp"
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

// A text with the path of a file.
nb::object path_text(const std::string &text) {
    const nb::bytes bytes(text.data(), text.size());
#if defined(_WIN32)
    return bytes.attr("decode")("mbcs", "replace");
#else
    return nb::module_::import_("os").attr("fsdecode")(bytes);
#endif
}

// What `work` returns; it runs without the interpreter's lock.
template <class Work>
nb::bytes bytes_of(const Work &work) {
    std::string found;
    {
        const nb::gil_scoped_release release;
        found = work();
    }
    return nb::bytes(found.data(), found.size());
}

// Calls `compile(source, macros, arch)`, which returns bytes.
cuda::Device::Compile code_from(nb::callable compile) {
    return [compile = std::move(compile)](const cuda::Kernel &kernel, const std::string &arch) {
        const nb::gil_scoped_acquire lock;
        const nb::object code = compile(kernel.source, kernel.macros, arch);
        const auto found = nb::cast<nb::bytes>(code);
        return std::string(found.c_str(), found.size());
    };
}

// Calls `start(work)`.
cuda::StartThread thread_from(nb::callable start) {
    return [start = std::move(start)](std::function<void()> work) {
        const nb::gil_scoped_acquire lock;
        start(nb::cpp_function([work = std::move(work)] {
            const nb::gil_scoped_release release;
            work();
        }));
    };
}

}  // namespace

// A compiler's log may have any bytes.
void cuda::fail(const std::string &message) {
    const nb::gil_scoped_acquire lock;
    const nb::object text = nb::bytes(message.c_str()).attr("decode")("utf-8", "replace");
    const nb::object kind =
        nb::module_::import_("quant_gru.kernel_runtime.errors").attr("KernelError");
    PyErr_SetObject(kind.ptr(), text.ptr());
    throw nb::python_error();
}

}  // namespace kernel_runtime

NB_MODULE(_native, m) {
    using namespace kernel_runtime;
    // Launches that are still in use when the interpreter exits are not leaks.
    nb::set_leak_warnings(false);
    nb::list functions;
    for (const char *name : cuda::Compiler::kFunctions) functions.append(name);
    nb::class_<cuda::Compiler>(m, "Compiler")
        .def(nb::init<const std::vector<uintptr_t> &, const cuda::Compiler::Texts &>())
        .def_prop_ro("version", &cuda::Compiler::version)
        .def("key_of",
             [](const cuda::Compiler &compiler, const std::string &source,
                const cuda::Compiler::Texts &macros, const std::string &arch) {
                 const nb::gil_scoped_release release;
                 return compiler.key_of({source, {}, macros}, arch);
             })
        .def("compile", [](const cuda::Compiler &compiler, const std::string &source,
                           const cuda::Compiler::Texts &macros, const std::string &arch) {
            return bytes_of([&] { return compiler.compile({source, {}, macros}, arch); });
        });
    m.attr("NVRTC_FUNCTIONS") = nb::tuple(functions);
    nb::class_<cuda::CubinCache>(m, "CubinCache")
        .def("__init__",
             [](cuda::CubinCache *self, const std::string &variable, const std::string &name,
                const nb::callable &warn) {
                 new (self) cuda::CubinCache(variable, name, [warn](const std::string &message) {
                     const nb::gil_scoped_acquire lock;
                     warn(path_text(message));
                 });
             })
        .def_prop_ro("folder", [](const cuda::CubinCache &c) { return path_text(c.folder()); })
        .def("load",
             [](const cuda::CubinCache &cache, const std::string &key) {
                 return bytes_of([&] { return cache.load(key); });
             })
        .def("store",
             [](const cuda::CubinCache &cache, const std::string &key, const nb::bytes &code) {
                 return path_text(cache.store(key, {code.c_str(), code.size()}));
             });
    nb::class_<Fields>(m, "Fields")
        .def(nb::init<>())
        .def("add", &Fields::add)
        .def("move", &Fields::move);
    // A full launch queue may wait for a host function that needs the GIL.
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<cuda::Driver>(m, "Driver")
        .def("__init__",
             [](cuda::Driver *self) { new (self) cuda::Driver(cuda::driver_library("")); })
        .def("__init__", [](cuda::Driver *self, const std::map<std::string, uintptr_t> &functions) {
            new (self) cuda::Driver([&functions](const char *name) {
                const auto found = functions.find(name);
                return reinterpret_cast<void *>(found == functions.end() ? 0 : found->second);
            });
        });
    using Macros = cuda::Compiler::Texts;
    nb::class_<cuda::Device>(m, "Device")
        .def(
            "__init__",
            [](cuda::Device *self, const cuda::Driver &driver, int index, nb::callable compile,
               nb::callable start, bool graphs) {
                new (self) cuda::Device(driver, index, code_from(std::move(compile)),
                                        thread_from(std::move(start)), graphs);
            },
            nb::keep_alive<1, 2>())
        .def_prop_ro("arch", &cuda::Device::arch)
        .def_prop_ro("has_clusters", &cuda::Device::has_clusters)
        .def("clusters", &cuda::Device::clusters, Unlocked())
        .def(
            "expect",
            [](cuda::Device &device, const std::string &source, const Macros &macros) {
                device.expect({source, {}, macros});
            },
            Unlocked())
        .def(
            "load",
            [](cuda::Device &device, const std::string &source, const std::string &function,
               const Macros &macros, const GridTuple &grid) {
                const cuda::Kernel kernel{source, function, macros};
                while (!device.wait(kernel, std::chrono::milliseconds(100))) {
                    const nb::gil_scoped_acquire lock;
                    if (PyErr_CheckSignals()) throw nb::python_error();
                }
                return reinterpret_cast<uintptr_t>(device.load(kernel, grid_of(grid)).handle);
            },
            Unlocked())
        .def(
            "launch",
            [](const cuda::Device &device, uintptr_t function, const GridTuple &grid,
               uintptr_t argument, uintptr_t stream) {
                const cuda::Configured configured(grid_of(grid),
                                                  reinterpret_cast<cuda::Stream>(stream));
                return device.in_context(
                    [&] { return device.launch(configured.config, function, argument); });
            },
            Unlocked())
        .def("check",
             [](const cuda::Device &device, int status) { device.driver().check(status); });
    nb::class_<Launches>(m, "Launches")
        .def(nb::init<cuda::Device &>(), nb::keep_alive<1, 2>())
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
