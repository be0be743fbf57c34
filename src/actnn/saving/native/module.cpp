// The Python module: what a forward pass saves, and the forms in which it is held.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "actnn/saving/native/step.hpp"

namespace nb = nanobind;
using namespace actnn;

namespace {

// A step whose forward is running, and its pack hook; None for a call inside of the same step.
struct Running {
    nb::handle step, pack;
};
// Those of this thread, the innermost last. Python keeps them alive.
thread_local std::vector<Running> running;

nb::object pack(const nb::handle &tensor) {
    if (running.empty()) throw std::logic_error("no step is running in this thread");
    return nb::inst_ptr<Step>(running.back().step)->pack(tensor);
}

// Whether a transform of torch.func, or differentiation in forward mode, is running.
bool transformed() {
    static const nb::object *const forward =
        new nb::object(nb::module_::import_("torch.autograd.forward_ad"));
    static const nb::object *const transforms = new nb::object(
        nb::module_::import_("torch._C").attr("_functorch").attr("peek_interpreter_stack"));
    static const nb::object *const level = new nb::object(nb::str("_current_level"));
    return 0 <= number(checked(PyObject_GetAttr(forward->ptr(), level->ptr()))) ||
           !call(*transforms).is_none();
}

// The innermost step, or None if its hooks do not see what is saved.
nb::object active() {
    static const nb::object *const innermost =
        new nb::object(nb::getattr(nb::module_::import_("torch._C").attr("_autograd"),
                                   "_top_saved_tensors_default_hooks", nb::none()));
    if (running.empty() || transformed()) return nb::none();
    const Running last = running.back();
    if (!innermost->is_none()) {
        const nb::object hooks = (*innermost)(false);
        if (hooks.is_none()) return hooks;
        const nb::object pack = hooks[0];
        if (!pack.is(last.pack) && !holds_true(last.step.attr("saving").attr("is_own")(pack)))
            return nb::none();
    }
    return nb::borrow(last.step);
}

// The same for what a layer does with its input: also None if a tensor has no gradient, or is
// smaller than what is compressed or than a number of bytes.
nb::object active_for(const nb::handle &tensor, int64_t least) {
    const Torch &t = torch();
    if (running.empty() || !t.is_plain(tensor.ptr()) ||
        !holds_true(t.requires_grad.of(tensor.ptr())))
        return nb::none();
    Description d;
    const int64_t bytes = t.tensors.describe(tensor.ptr(), d)
                              ? d.elements() * d.bytes
                              : nb::cast<int64_t>(tensor.attr("nbytes"));
    least = std::max(least, nb::inst_ptr<Step>(running.back().step)->min_bytes());
    return bytes < least ? nb::none() : active();
}

// The hook of a saved tensor. other: for tensors of subclasses, which a compiler may be tracing.
nb::object pack_or(const nb::handle &other, const nb::handle &x) {
    return torch().is_plain(x.ptr()) ? pack(x) : other(x);
}

// The hook that returns it. other: for what a traced graph holds, tensors and tuples; None if no
// graph is traced with it.
nb::object unpack_or(const nb::handle &other, const nb::handle &held) {
    const bool traced =
        !as<Kept>(held) && !as<Compressed>(held) && !as<View>(held) &&
        (PyTuple_Check(held.ptr()) || PyObject_IsInstance(held.ptr(), torch().tensor.ptr()) == 1);
    return traced ? other(held) : unpack_for_backward(held);
}

// A function of Python with one argument, called at less cost than those of nanobind.
template <nb::object (*function)(const nb::handle &other, const nb::handle &x)>
nb::object hook(const nb::handle &other) {
    static PyMethodDef definition = {"hook",
                                     [](PyObject *other, PyObject *x) noexcept -> PyObject * {
                                         try {
                                             return function(other, x).release().ptr();
                                         } catch (nb::python_error &error) {
                                             error.restore();
                                         } catch (const std::exception &error) {
                                             PyErr_SetString(PyExc_RuntimeError, error.what());
                                         }
                                         return nullptr;
                                     },
                                     METH_O, nullptr};
    return checked(PyCFunction_New(&definition, other.ptr()));
}

// What an object of Python has, of whose class nanobind knows nothing.
Kept &kept(const nb::handle &self) {
    if (Kept *const found = as<Kept>(self)) return *found;
    throw nb::type_error("Expected a Kept");
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // steps that are running when the interpreter exits
    nb::class_<Counter>(m, "Counter").def(nb::init<>()).def_ro("bytes", &Counter::bytes);
    nb::object kept_type = Kept::type();
    const nb::object property = nb::module_::import_("builtins").attr("property");
    kept_type.attr("held") =
        property(nb::cpp_function([](nb::handle self) { return kept(self).held(); }));
    kept_type.attr("tensor") =
        property(nb::cpp_function([](nb::handle self) { return kept(self).tensor(); }));
    kept_type.attr("codes") = nb::none();
    kept_type.attr("replace") = nb::cpp_function(
        [](nb::handle self, nb::object function) { kept(self).replace(std::move(function)); },
        nb::is_method());
    kept_type.attr("unpack") =
        nb::cpp_function([](nb::handle self, nb::handle view) { return kept(self).unpack(view); },
                         nb::is_method(), nb::arg("view") = nb::none());
    m.attr("Kept") = kept_type;
    nb::class_<Compressed>(m, "Compressed", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](Compressed *self, nb::object codes, nb::object decode, nb::object sides,
               nb::object shape, nb::object strides, nb::object dtype, int64_t held, int64_t groups,
               std::shared_ptr<Counter> counter) {
                new (self) Compressed(
                    {std::move(codes), std::move(decode), std::move(sides), std::move(shape),
                     std::move(strides), std::move(dtype), held, groups},
                    std::move(counter));
            },
            nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
            nb::arg(), nb::arg())
        .def_prop_ro("held", &Compressed::held)
        .def_prop_ro("codes", &Compressed::codes)
        .def("keep", &Compressed::keep)
        .def("divided", &Compressed::divided)
        .def("compares", &Compressed::compares)
        .def("hold_beside", &Compressed::hold_beside, nb::arg().none())
        .def("unpack", nb::overload_cast<const nb::handle &>(&Compressed::unpack),
             nb::arg("view") = nb::none());
    nb::class_<View>(m, "View", nb::is_weak_referenceable())
        .def_prop_ro("codes", &View::codes)
        .def("keep", &View::keep)
        .def("divided", &View::divided)
        .def("compares", &View::compares)
        .def("hold_beside", &View::hold_beside, nb::arg().none())
        .def("unpack", &View::unpack);
    nb::class_<ModulePaths>(m, "ModulePaths")
        .def(nb::init<nb::dict, nb::object, nb::object>())
        .def("current", [](const ModulePaths &paths) {
            const Where found = paths.current();
            return nb::make_tuple(found.path, found.boundary, found.module);
        });
    nb::class_<ModelTensors>(m, "ModelTensors").def(nb::init<>()).def("read", &ModelTensors::read);
    nb::class_<Records>(m, "Records")
        .def(nb::init<nb::object>())
        .def("__len__", &Records::size)
        .def("__getitem__", &Records::get)
        .def("change", &Records::change);
    nb::class_<Decisions>(m, "Decisions").def(nb::init<>());
    nb::class_<Uses>(m, "Uses").def(nb::init<>());
    nb::class_<Step>(m, "Step")
        .def(
            "__init__",
            [](Step *self, int64_t min_bytes, bool by_sample, bool decides_by_path, bool caches,
               bool adaptive, std::shared_ptr<Counter> counter, const ModulePaths &paths,
               const ModelTensors &model, Decisions &decisions, Uses &uses, nb::object records) {
                new (self)
                    Step(min_bytes, by_sample, decides_by_path, caches, adaptive,
                         std::move(counter), paths, model, decisions, uses, std::move(records));
            },
            nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
            nb::keep_alive<1, 11>())
        .def("pack", &Step::pack)
        .def("add_known", &Step::add_known)
        .def("keep_exact", &Step::keep_exact)
        .def("forget", &Step::forget)
        .def_prop_ro("records", &Step::records)
        .def_prop_ro("is_first", &Step::is_first)
        .def_prop_rw("opaque", &Step::opaque, &Step::set_opaque, nb::arg().none())
        .def("_next", &Step::next)
        .def("_claim", &Step::claim)
        .def("_promise", &Step::promise, nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg().none())
        .def("_note", &Step::note)
        .def("_keep_operand", &Step::keep_operand)
        .def("_compare", &Step::keep_compared)
        .def("_operands", &Step::operands)
        .def("_last_kept", &Step::last_kept);
    m.def("set_rules", &set_rules);
    m.def("set_held_rules", [](nb::object refuse_changed, nb::object refuse_second_derivative,
                               nb::object restore_sides, nb::object view_of_storage,
                               nb::object norms, nb::object limit_normalized) {
        HeldRules &rules = held_rules();
        rules.refuse_changed = refuse_changed;
        rules.refuse_second_derivative = refuse_second_derivative;
        rules.restore_sides = restore_sides;
        rules.view_of_storage = view_of_storage;
        rules.norms = norms;
        rules.limit_normalized = limit_normalized;
    });
    m.def("set_divides", [](nb::object divides) { held_rules().divides = divides; });
    m.def("in_custom_function", &in_custom_function);
    m.def("mark_computed", [] { Step::marked_computed = true; });
    m.def(
        "begin", [](nb::handle step, nb::handle pack) { running.push_back({step, pack}); },
        nb::arg(), nb::arg().none());
    m.def("end", [] { running.pop_back(); });
    m.def("pack", &pack);
    m.def("active", &active);
    m.def("active_for", &active_for, nb::arg(), nb::arg() = 0);
    m.def("transformed", &transformed);
    m.def("pack_hook", &hook<pack_or>);
    m.def("unpack_hook", &hook<unpack_or>, nb::arg().none());
}
