// The Python module: CPU kernels, and prepared launches on a GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/cpu_module.hpp"
#include "bindings/cuda_backward.hpp"
#include "bindings/cuda_call.hpp"
#include "bindings/effects.hpp"
#include "bindings/gpu_backward.hpp"
#include "bindings/gpu_launches.hpp"
#include "bindings/gpu_plans.hpp"
#include "bindings/packed_rows.hpp"
#include "bindings/prepared_call.hpp"
#include "bindings/tensor_cell.hpp"
#include "bindings/weight_guard.hpp"
#include "kernel_runtime/native/launch_list.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

// Fields of Call::Input.
using InputNumbers = std::tuple<uintptr_t, uintptr_t, uintptr_t>;

void make_call(Call *self, Steps &steps, const std::vector<InputNumbers> &inputs, int64_t features,
               int64_t bytes, const std::vector<nb::object> &makers, nb::handle tensor,
               int64_t device, const nb::tuple &stream) {
    std::vector<Call::Input> found;
    for (const auto &[step, next, fours] : inputs) found.push_back({step, next, fours});
    std::vector<Maker> made;
    for (const nb::object &each : makers) made.emplace_back(each);
    new (self) Call(steps, found, features, bytes, std::move(made), Tensors(tensor, device),
                    CurrentStream(stream));
}

void start_steps(Steps &steps, uintptr_t stream, const std::vector<uintptr_t> &bases,
                 const nb::args &arguments) {
    if (bases.size() < steps.tensors())
        throw nb::value_error("Expected an address for each tensor that fields follow");
    steps.start(stream, bases, arguments, nullptr, [] {});
}

nb::object run_call(Call &call, const nb::object &x, const nb::object &h0,
                    const nb::object &lengths, const nb::object &packing) {
    auto given = [](const nb::object &o) { return o.is_none() ? nullptr : o.ptr(); };
    const Tensors &tensors = call.tensors();
    Call::Given all{
        x.ptr(), given(h0), given(lengths), {}, {}, false, Packing::of(packing, tensors)};
    if (!tensors.view(all.x, all.x_view, all.packing ? 2 : 3) ||
        (all.h0 && !tensors.view(all.h0, all.h0_view)))
        throw nb::value_error(
            "Expected x to be of real values and of three dimensions on the device, or of two "
            "where "
            "it is packed, and h0 to be of three");
    return call.run(all, nullptr);
}

// Device, bytes of workspace, maximum bytes to keep, cells, whether rows are packed, T, N.
using BackwardNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t>;
using Dimensions = std::vector<int64_t>;

void make_gpu_backward(GPUBackward *self, Steps &steps, const BackwardNumbers &sizes,
                       const std::vector<std::tuple<Dimensions, Dimensions, int>> &layouts,
                       const std::vector<nb::object> &makers, const nb::tuple &torch) {
    const auto &[device, space, most, cells, is_packed, T, N] = sizes;
    std::vector<GPUBackward::Layout> found;
    for (const auto &[shape, strides, kind] : layouts)
        found.push_back({shape, strides, static_cast<Float>(kind)});
    new (self) GPUBackward(steps, {device, space, most, cells, is_packed, T, N}, std::move(found),
                           makers, torch);
}

nb::object run_gpu_backward(GPUBackward &call, const nb::object &x, const nb::object &h0,
                            const nb::object &outs, const nb::object &nan, const nb::object &grad_y,
                            const nb::object &grad_last, const nb::object &packing) {
    return call.run({x, h0, outs, nan, grad_y, grad_last, packing});
}

void watch_contents(WeightGuard &guard, nb::object looks, uintptr_t found, int32_t mark,
                    uintptr_t parts, nb::object stream) {
    if (nb::cast<Steps &>(looks).tensors() > 1) throw nb::value_error("Expected fields of a part");
    guard.watch(
        std::make_unique<ContentWatch>(std::move(looks), found, mark, parts, std::move(stream)));
}

// Index of the device, states, C, H.
using PreparedNumbers = std::tuple<int64_t, int64_t, int64_t, int64_t>;

void make_prepared_check(PreparedCheck *self, const PreparedNumbers &sizes,
                         const WeightGuard &guard, const nb::tuple &torch) {
    const auto &[device, states, C, H] = sizes;
    new (self) PreparedCheck({device, states, C, H}, guard, torch);
}

void make_prepared_gpu(PreparedCallGPU *self, const PreparedNumbers &sizes,
                       const WeightGuard &guard, const nb::tuple &torch, int64_t most) {
    const auto &[device, states, C, H] = sizes;
    new (self) PreparedCallGPU({device, states, C, H}, guard, torch, most);
}

void make_prepared_step(PreparedStepGPU *self, const PreparedNumbers &sizes,
                        const WeightGuard &guard, const nb::tuple &torch,
                        const UpdateChanges &changes, int64_t most, nb::object fail) {
    const auto &[device, states, C, H] = sizes;
    new (self)
        PreparedStepGPU({device, states, C, H}, guard, torch, changes, most, std::move(fail));
}

// Returns the fields of PackedRows, and a copy of the sizes.
std::tuple<int64_t, int64_t, int64_t, nb::bytes> find_packed_rows(uintptr_t batch_sizes,
                                                                  int64_t T) {
    const auto *sizes = reinterpret_cast<const int64_t *>(batch_sizes);
    const PackedRows found = packed_rows(sizes, T);
    return {found.N, found.rows, found.wrong, nb::bytes(sizes, static_cast<size_t>(T) * 8)};
}

void write_packed_layout(const nb::bytes &sizes, int64_t N, uintptr_t to) {
    packed_layout(static_cast<const int64_t *>(sizes.data()),
                  static_cast<int64_t>(sizes.size() / 8), N, reinterpret_cast<int64_t *>(to));
}

}  // namespace
}  // namespace quant_gru

NB_MODULE(_native, m) {
    using namespace quant_gru;
    // Plans that are still in use when the interpreter exits are not leaks.
    nb::set_leak_warnings(false);
    // Defines the types Launches and Fields, which arguments below have.
    nb::module_::import_("quant_gru.kernel_runtime._native");
    bind_cpu(m);
    bind_effects(m);
    bind_gpu_plans(m);
    bind_cell_arrays(m);
    bind_gpu_launches(m);
    bind_gpu_backward(m);
    nb::class_<WeightGuard>(m, "WeightGuard")
        .def(nb::init<const nb::handle &, const nb::sequence &, nb::object>(), nb::arg(), nb::arg(),
             nb::arg().none())
        .def("unchanged", &WeightGuard::unchanged)
        .def("in_place", &WeightGuard::in_place)
        .def("watch", &watch_contents)
        .def("look", &WeightGuard::look)
        .def("found_silent_write", &WeightGuard::found_silent_write);
    nb::class_<ContentSample>(m, "ContentSample")
        .def("__init__",
             [](ContentSample *self, uintptr_t data, size_t bytes) {
                 new (self) ContentSample(reinterpret_cast<const void *>(data), bytes);
             })
        .def("unchanged", &ContentSample::unchanged);
    nb::class_<PreparedCall>(m, "PreparedCall")
        .def("run", &PreparedCall::run, nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg(), nb::arg().none() = nb::none());
    nb::class_<PreparedCheck, PreparedCall>(m, "PreparedCheck")
        .def("__init__", &make_prepared_check, nb::keep_alive<1, 3>());
    nb::class_<UpdateChanges>(m, "UpdateChanges")
        .def(nb::init<>())
        .def_rw("count", &UpdateChanges::count);
    nb::class_<PreparedStepGPU, PreparedCheck>(m, "PreparedStepGPU")
        .def("__init__", &make_prepared_step, nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>())
        .def("add", &PreparedStepGPU::add, nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
        .def("follow", &PreparedStepGPU::follow)
        .def("follows", &PreparedStepGPU::follows);
    nb::class_<PreparedCallCPU, PreparedCall>(m, "PreparedCallCPU")
        .def(nb::init<CPUCalls &, const WeightGuard &, const nb::tuple &, const nb::object &>(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none());
    nb::class_<PreparedStepCPU, PreparedCheck>(m, "PreparedStepCPU")
        .def(nb::init<CPUCalls &, const WeightGuard &, const nb::tuple &, const nb::object &,
                      nb::object>(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg());
    nb::class_<PreparedCallGPU, PreparedCall>(m, "PreparedCallGPU")
        .def("__init__", &make_prepared_gpu, nb::keep_alive<1, 3>())
        .def("add", &PreparedCallGPU::add);
    m.def("packed_rows", &find_packed_rows);
    m.def("wrong_index", [](uintptr_t indices, int64_t N) {
        return wrong_index(reinterpret_cast<const int64_t *>(indices), N);
    });
    m.def("packed_layout", &write_packed_layout);
    nb::class_<PackingOf>(m, "PackingOf")
        .def(nb::init<const nb::object &, int64_t, nb::object, nb::object>())
        .def("__call__", &PackingOf::operator());
    nb::class_<Steps>(m, "Steps")
        .def(nb::init<const std::vector<nb::object> &, std::vector<std::vector<size_t>>,
                      std::vector<Fields *>, nb::object, nb::object>())
        .def("start", &start_steps);
    nb::class_<Call>(m, "Call")
        .def("__init__", &make_call, nb::keep_alive<1, 2>())
        .def("run", &run_call, nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg().none() = nb::none());
    nb::class_<GPUBackward>(m, "GPUBackward")
        .def("__init__", &make_gpu_backward, nb::keep_alive<1, 2>())
        .def("run", &run_gpu_backward, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none(), nb::arg().none() = nb::none())
        .def("forget", &GPUBackward::forget);
}
