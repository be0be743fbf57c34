#include "kernel_runtime/native/tensor_view.hpp"

namespace nb = nanobind;

namespace kernel_runtime {
namespace {

constexpr uint32_t kMajor = 1;
constexpr int32_t kCPU = 1, kCUDA = 2;
constexpr uint8_t kFloat = 2;

}  // namespace

bool View::is_contiguous() const {
    int64_t step = 1;
    for (int i = 2; i >= 0; --i) {
        if (shape[i] != 1 && strides[i] != step) return false;
        step *= shape[i];
    }
    return true;
}

Tensors::Tensors(const nb::handle &type, int64_t device)
    : device_(device),
      type_(nb::borrow(type)),
      float32_(nb::module_::import_("torch").attr("float32")),
      strided_(nb::module_::import_("torch").attr("strided")),
      dtype_(type, "dtype"),
      layout_(type, "layout"),
      is_here_(type, device < 0 ? "is_cpu" : "is_cuda"),
      shape_(type, "shape"),
      version_(type, "_version"),
      requires_grad_(type, "requires_grad"),
      data_ptr_(type, "data_ptr"),
      stride_(type, "stride"),
      is_neg_(type, "is_neg"),
      get_device_(type, "get_device"),
      is_contiguous_(type, "is_contiguous") {
    const nb::object found = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(found.ptr(), "dlpack_exchange_api")) return;
    table_ = static_cast<const Table *>(PyCapsule_GetPointer(found.ptr(), "dlpack_exchange_api"));
    while (table_ && table_->major != kMajor) table_ = table_->before;
}

bool Tensors::look(PyObject *tensor, Look &to) const {
    if (!table_) return false;
    if (!table_->look(tensor, &to)) return true;
    // what it has no terms for
    PyErr_Clear();
    return false;
}

bool Tensors::is_ours(const Look &found) const {
    const bool here = device_ < 0 ? found.device_type == kCPU
                                  : found.device_type == kCUDA && found.device == device_;
    return here && found.code == kFloat && found.bits == 32 && found.lanes == 1;
}

bool Tensors::view(PyObject *tensor, View &to) const {
    Look found;
    if (look(tensor, found)) {
        if (!is_ours(found) || found.dimensions != 3) return false;
        to.address = reinterpret_cast<uintptr_t>(found.data) + found.offset;
        for (int i = 0; i < 3; ++i) {
            to.shape[i] = found.shape[i];
            to.strides[i] = found.strides[i];
        }
        return true;
    }
    if (!dtype_.of(tensor).is(float32_) || !layout_.of(tensor).is(strided_) ||
        !holds_true(is_here_.of(tensor)) || number(get_device_.call(tensor)) != device_)
        return false;
    const nb::object shape = shape_.of(tensor);
    if (PyTuple_Size(shape.ptr()) != 3) return false;
    numbers(shape, to.shape);
    numbers(stride_.call(tensor), to.strides);
    to.address = address(tensor);
    return true;
}

bool Tensors::is_at(PyObject *tensor, uintptr_t address, const std::vector<int64_t> &shape) const {
    const auto dimensions = static_cast<int32_t>(shape.size());
    Look found;
    if (look(tensor, found)) {
        if (reinterpret_cast<uintptr_t>(found.data) + found.offset != address || !is_ours(found) ||
            found.dimensions != dimensions)
            return false;
        int64_t step = 1;
        for (int32_t i = dimensions - 1; i >= 0; --i) {
            if (found.shape[i] != shape[i] || (shape[i] != 1 && found.strides[i] != step))
                return false;
            step *= shape[i];
        }
        return true;
    }
    if (!dtype_.of(tensor).is(float32_) || this->address(tensor) != address ||
        !holds_true(is_here_.of(tensor)) || !is_contiguous(tensor))
        return false;
    const nb::object sizes = shape_.of(tensor);
    if (PyTuple_Size(sizes.ptr()) != dimensions) return false;
    for (int32_t i = 0; i < dimensions; ++i)
        if (number(nb::borrow(PyTuple_GetItem(sizes.ptr(), i))) != shape[i]) return false;
    return true;
}

uintptr_t Tensors::address(PyObject *tensor) const {
    Look found;
    if (look(tensor, found)) return reinterpret_cast<uintptr_t>(found.data) + found.offset;
    return static_cast<uintptr_t>(number(data_ptr_.call(tensor)));
}

}  // namespace kernel_runtime
