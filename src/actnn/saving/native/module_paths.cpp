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

ModulePaths::Kind ModulePaths::kind_of(const nb::object &code) const {
    const auto known = kinds_.find(code.ptr());
    if (known != kinds_.end()) return known->second;
    if (codes_.size() == kMostCodes) {  // of functions that are made again and again
        kinds_.clear();
        codes_.clear();
    }
    codes_.push_back(code);
    const nb::object file = file_.of(code.ptr());
    const bool is_checkpoint = PyObject_RichCompareBool(file.ptr(), checkpoint_.ptr(), Py_EQ) == 1;
    return kinds_[code.ptr()] = code.is(call_)  ? Kind::call
                                : is_checkpoint ? Kind::checkpoint
                                                : Kind::other;
}

Where ModulePaths::current() const {
    Where found{none_, false, nb::none()};
    nb::object frame = nb::borrow(reinterpret_cast<PyObject *>(PyEval_GetFrame()));
    while (frame.is_valid() && !frame.is_none()) {
        auto *const running = reinterpret_cast<PyFrameObject *>(frame.ptr());
        const nb::object code = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(running)));
        const Kind kind = kind_of(code);
        if (kind == Kind::call) {
            const nb::object locals = locals_.of(frame.ptr());
            const nb::object module = checked(PyObject_GetItem(locals.ptr(), self_.ptr()));
            if (found.module.is_none()) found.module = module;
            const auto path = paths_.find(module.ptr());
            if (path != paths_.end()) {
                found.path = path->second;
                return found;
            }
        } else if (kind == Kind::checkpoint) {
            found.boundary = true;
        }
        frame = back_.of(frame.ptr());
    }
    return found;
}

}  // namespace actnn
