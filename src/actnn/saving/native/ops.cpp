#include "actnn/saving/native/ops.hpp"

#include <nanobind/stl/string.h>

#include <map>
#include <string>
#include <unordered_map>

#include "actnn/saving/native/torch_api.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

// What saving/step.py tells at its import.
struct Rules {
    nb::object keep;                 // the choice
    nb::object forms, looking_back;  // names of nodes
};
Rules &rules() {
    static Rules *const found = new Rules;
    return *found;
}

nb::object name_of(const nb::object &node) { return node.attr("name")(); }

}  // namespace

const Op *op_of(const nb::handle &tensor) {
    static auto *const known = new std::unordered_map<PyObject *, Op>;
    static auto *const others = new std::map<std::string, Op>;
    const nb::object node = torch().grad_fn.of(tensor.ptr());
    if (node.is_none()) return nullptr;
    auto *const type = reinterpret_cast<PyObject *>(Py_TYPE(node.ptr()));
    const auto found = known->find(type);
    if (found != known->end()) return &found->second;
    const nb::object name = name_of(node), kind = nb::borrow(type);
    const Op op{name, kind, nb::cast<bool>(rules().forms.attr("__contains__")(name)),
                nb::cast<bool>(rules().looking_back.attr("__contains__")(name))};
    // Nodes without a type of their own share one.
    if (nb::cast<std::string>(kind.attr("__name__")) == "CppFunction")
        return &others->emplace(nb::cast<std::string>(name), op).first->second;
    return &known->emplace(type, op).first->second;
}

bool in_custom_function(const nb::handle &frame) {
    // What a Function gave to save_for_backward is packed after its forward, within its apply.
    static const nb::object *const apply = new nb::object(
        nb::module_::import_("torch.autograd").attr("Function").attr("apply").attr("__code__"));
    if (!frame.is_valid()) return false;
    const nb::object code = nb::steal(reinterpret_cast<PyObject *>(
        PyFrame_GetCode(reinterpret_cast<PyFrameObject *>(frame.ptr()))));
    if (!code.is(*apply)) return false;
    const nb::object cls = frame.attr("f_locals")["cls"];
    const auto module = nb::cast<std::string>(cls.attr("__module__"));
    for (const char *const known : {"torch.", "actnn.", "quant_gru."})
        if (module.rfind(known, 0) == 0) return false;
    return true;
}

const nb::object &keep_choice() { return rules().keep; }

void set_rules(nb::object keep, nb::object forms, nb::object looking_back) {
    rules() = {std::move(keep), std::move(forms), std::move(looking_back)};
}

}  // namespace actnn
