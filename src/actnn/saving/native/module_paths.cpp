#include "actnn/saving/native/module_paths.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

nb::object frame_type() { return nb::module_::import_("types").attr("FrameType"); }

}  // namespace

ModulePaths::ModulePaths(const nb::dict &paths, nb::object call, nb::object checkpoint)
    : call_(std::move(call)),
      checkpoint_(std::move(checkpoint)),
      none_(nb::str("")),
      back_(frame_type(), "f_back"),
      locals_(frame_type(), "f_locals"),
      file_(nb::module_::import_("types").attr("CodeType"), "co_filename"),
      self_(nb::str("self")) {
    for (const auto &[module, path] : paths)
        paths_.emplace(reinterpret_cast<PyObject *>(nb::cast<uintptr_t>(module)), nb::borrow(path));
}

Where ModulePaths::current() const {
    Where found{none_, false, nb::none()};
    nb::object frame = nb::borrow(reinterpret_cast<PyObject *>(PyEval_GetFrame()));
    while (frame.is_valid() && !frame.is_none()) {
        auto *const running = reinterpret_cast<PyFrameObject *>(frame.ptr());
        const nb::object code = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(running)));
        if (code.is(call_)) {
            const nb::object locals = locals_.of(frame.ptr());
            const nb::object module = checked(PyObject_GetItem(locals.ptr(), self_.ptr()));
            if (found.module.is_none()) found.module = module;
            const auto path = paths_.find(module.ptr());
            if (path != paths_.end()) {
                found.path = path->second;
                return found;
            }
        } else if (!found.boundary) {
            const nb::object file = file_.of(code.ptr());
            found.boundary = file.is(checkpoint_) ||
                             PyObject_RichCompareBool(file.ptr(), checkpoint_.ptr(), Py_EQ) == 1;
        }
        frame = back_.of(frame.ptr());
    }
    return found;
}

}  // namespace actnn
