// Which module's forward is running, found in the call stack: nothing is installed in the model.
#pragma once

#include <nanobind/nanobind.h>

#include <unordered_map>

#include "actnn/saving/native/torch_api.hpp"

namespace actnn {

// The module that is being called.
struct Where {
    nanobind::object path;  // of the innermost module of the model; '' if there is none
    // Whether torch.utils.checkpoint was called inside of it, so that its inputs are being saved.
    bool boundary = false;
    nanobind::object module;  // the innermost one, of the model or not; None if there is none
};

class ModulePaths {
 public:
    // paths: id of a module -> its path. call: the code of torch.nn.Module._wrapped_call_impl,
    // whose frames have few variables. checkpoint: the file of torch.utils.checkpoint.
    ModulePaths(const nanobind::dict &paths, nanobind::object call, nanobind::object checkpoint);
    Where current() const;
    // The path of a module; '' if the model has none such.
    const nanobind::object &path_of(const nanobind::handle &module) const {
        const auto found = paths_.find(module.ptr());
        return found == paths_.end() ? none_ : found->second;
    }

 private:
    std::unordered_map<PyObject *, nanobind::object> paths_;
    nanobind::object call_, checkpoint_, none_;
    Attribute back_, locals_, file_;
    nanobind::object self_;
};

}  // namespace actnn
