#include "actnn/saving/native/torch_api.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

nb::object get(const char *module, const char *name) {
    return nb::module_::import_(module).attr(name);
}

nb::object storage_type() { return get("torch", "UntypedStorage"); }

}  // namespace

Torch::Torch()
    : tensor(get("torch", "Tensor")),
      parameter(get("torch.nn", "Parameter")),
      tensors(tensor, -1),
      storage(tensor, "untyped_storage"),
      grad_fn(tensor, "grad_fn"),
      base(tensor, "_base"),
      requires_grad(tensor, "requires_grad"),
      is_leaf(tensor, "is_leaf"),
      detach(tensor, "detach"),
      shape(tensor, "shape"),
      stride(tensor, "stride"),
      dtype(tensor, "dtype"),
      device(tensor, "device"),
      storage_offset(tensor, "storage_offset"),
      is_neg(tensor, "is_neg"),
      is_conj(tensor, "is_conj"),
      address(storage_type(), "_cdata"),
      weak_ref(storage_type(), "_weak_ref"),
      nbytes(storage_type(), "nbytes"),
      free_weak_ref(storage_type().attr("_free_weak_ref")),
      from_weak_ref(storage_type().attr("_new_with_weak_ptr")),
      is_grad_enabled(get("torch", "is_grad_enabled")),
      graph_task(get("torch._C", "_current_graph_task_id")),
      current_node(get("torch._C", "_current_autograd_node")),
      as_strided(tensor.attr("as_strided")),
      clone(tensor.attr("clone")) {}

const Torch &torch() {
    static const Torch *const found = new Torch;
    return *found;
}

WeakStorage::WeakStorage(const nb::object &storage)
    : reference_(static_cast<uintptr_t>(number(torch().weak_ref.call(storage.ptr())))) {}

WeakStorage::~WeakStorage() {
    if (!reference_ || !Py_IsInitialized()) return;
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);  // an error may be on its way
    torch().free_weak_ref(reference_);
    PyErr_Restore(type, value, trace);
}

nb::object WeakStorage::get() const {
    return reference_ ? torch().from_weak_ref(reference_) : nb::none();
}

}  // namespace actnn
