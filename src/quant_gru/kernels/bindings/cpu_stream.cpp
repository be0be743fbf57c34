// Streams: calls from Python that run one step.
#include <nanobind/stl/vector.h>

#include <exception>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/cpu_calls.hpp"
#include "bindings/cpu_module.hpp"
#include "cpu/core/memory.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

// A stack with states in the caller's memory, which reads its input step by step. A step is so
// short that it keeps the GIL.
class Stream {
 public:
    // Sets the calls of a stack, and the addresses of the codes of each layer.
    void attach(const nb::object &owner, int64_t N, std::vector<uintptr_t> states) {
        auto &calls = nb::cast<CPUCalls &>(owner);
        const Stack &stack = calls.stack();
        owner_ = owner;
        calls_ = &calls;
        N_ = N;
        C_ = stack.layer(0, 0).C();
        states_ = std::move(states);
        make_ = calls.makers().real(Float::float32, {N, stack.layer(0, 0).H()});
        workspace_.emplace(static_cast<size_t>(stack.step_workspace(N)));
    }

    // Lets this thread, and no other, make calls without Python code; `disown` lets none.
    void own() { thread_ = std::this_thread::get_id(); }
    void disown() { thread_ = {}; }
    bool is_owned() const { return thread_ == std::this_thread::get_id(); }

    // Runs a step on x (N, C), float32 and contiguous without a gradient. Returns the output; sets
    // `nan` if x has a NaN, in whose place the step computes with 0. Returns null, without a step,
    // for other inputs.
    nb::object step(PyObject *x, bool &nan) {
        View view;
        if (!calls_) return {};
        const Tensors &tensors = calls_->tensors();
        if (!tensors.is_plain(x, view, 2) || view.kind != Float::float32 || view.shape[1] != N_ ||
            view.shape[2] != C_ || !view.is_contiguous() || tensors.requires_grad(x) ||
            tensors.is_neg(x))
            return {};
        nb::object y = make_();
        nan = calls_->stack().step(reinterpret_cast<const float *>(view.address), N_,
                                   reinterpret_cast<void *const *>(states_.data()),
                                   reinterpret_cast<float *>(tensors.address(y.ptr())),
                                   workspace_->data);
        return y;
    }

 private:
    nb::object owner_;  // of `calls_`
    CPUCalls *calls_ = nullptr;
    int64_t N_ = 0, C_ = 0;
    std::vector<uintptr_t> states_;
    Maker make_;
    std::optional<Aligned> workspace_;
    std::thread::id thread_;
};

// The result of a step, and whether x has a NaN; None for inputs that need preparation.
nb::object step(Stream &self, const nb::object &x) {
    bool nan = false;
    const nb::object y = self.step(x.ptr(), nan);
    return y.ptr() ? nb::object(nb::make_tuple(y, nan)) : nb::none();
}

// Calls a stream. The Python class completes a step with NaN, and makes all calls that need more
// than a step.
PyObject *call_stream(PyObject *self, PyObject *args, PyObject *kwargs) noexcept {
    static PyObject *const complete = PyUnicode_InternFromString("_complete");
    static PyObject *const general = PyUnicode_InternFromString("_general_call");
    try {
        if (!kwargs && PyTuple_Size(args) == 1 && nb::inst_ready(self)) {
            Stream &stream = *nb::inst_ptr<Stream>(self);
            PyObject *const x = PyTuple_GetItem(args, 0);
            bool nan = false;
            nb::object y;
            if (stream.is_owned()) y = stream.step(x, nan);
            if (y.ptr() && nan)
                y = kernel_runtime::checked(
                    PyObject_CallMethodObjArgs(self, complete, x, y.ptr(), nullptr));
            if (y.ptr()) return y.release().ptr();
        }
        const nb::object call = kernel_runtime::checked(PyObject_GetAttr(self, general));
        return PyObject_Call(call.ptr(), args, kwargs);
    } catch (nb::python_error &error) {
        error.restore();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void *>(call_stream)}, {0, nullptr}};

}  // namespace

void bind_stream(nb::module_ &m) {
    nb::class_<Stream>(m, "Stream", nb::type_slots(slots))
        .def(nb::init<>())
        .def("_attach", &Stream::attach)
        .def("_own", &Stream::own)
        .def("_disown", &Stream::disown)
        .def("_run_step", &step);
}

}  // namespace quant_gru
