#include "kernel_runtime/native/tensor_view.hpp"

#include <algorithm>

namespace nb = nanobind;

namespace kernel_runtime {
namespace {

constexpr uint32_t kMajor = 1;
constexpr int32_t kCPU = 1, kCUDA = 2;
constexpr uint8_t kInt = 0, kFloat = 2, kBFloat = 4;
const char *const kNames[4] = {"float32", "float16", "bfloat16", "float64"};

// Returns the dtype of real values (Float), or -1 for other dtypes.
int kind_of(uint8_t code, uint8_t bits, uint16_t lanes) {
    if (lanes != 1) return -1;
    if (code == kBFloat) return bits == 16 ? static_cast<int>(Float::bfloat16) : -1;
    if (code != kFloat) return -1;
    return static_cast<int>(bits == 32   ? Float::float32
                            : bits == 16 ? Float::float16
                            : bits == 64 ? Float::float64
                                         : static_cast<Float>(-1));
}

uint32_t dtype_number(uint8_t code, uint8_t bits, uint16_t lanes) {
    return uint32_t{code} << 24 | uint32_t{bits} << 16 | lanes;
}

// Whether a tuple has exactly these integers.
bool are_numbers(const nb::object &tuple, const std::vector<int64_t> &expected) {
    const auto count = static_cast<size_t>(PyTuple_Size(tuple.ptr()));
    if (count != expected.size()) return false;
    for (size_t i = 0; i < count; ++i) {
        PyObject *item = PyTuple_GetItem(tuple.ptr(), static_cast<Py_ssize_t>(i));
        if (number(nb::borrow(item)) != expected[i]) return false;
    }
    return true;
}

}  // namespace

bool View::is_contiguous() const {
    int64_t step = 1;
    for (int i = 2; i >= 0; --i) {
        if (shape[i] != 1 && strides[i] != step) return false;
        step *= shape[i];
    }
    return true;
}

int64_t Description::elements() const {
    int64_t found = 1;
    for (int i = 0; i < dimensions; ++i) found *= shape[i];
    return found;
}

bool Description::is_contiguous() const {
    int64_t step = 1;
    for (int i = dimensions - 1; i >= 0; --i) {
        if (shape[i] != 1 && strides[i] != step) return false;
        step *= shape[i];
    }
    return true;
}

bool Description::is_dense() const {
    if (is_contiguous() || !elements()) return true;
    int64_t step = 1;
    // Each dimension must begin where the product of those with smaller strides ends.
    int many = 0;
    for (int i = 0; i < dimensions; ++i) many += shape[i] != 1;
    for (; many > 0; --many) {
        int next = -1;
        for (int i = 0; i < dimensions && next < 0; ++i)
            if (shape[i] != 1 && strides[i] == step) next = i;
        if (next < 0) return false;
        step *= shape[next];
    }
    return true;
}

Tensors::Tensors(const nb::handle &type, int64_t device)
    : device_(device),
      type_(nb::borrow(type)),
      int64_(nb::module_::import_("torch").attr("int64")),
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
      is_contiguous_(type, "is_contiguous"),
      is_nested_(type, "is_nested"),
      is_cpu_(type, "is_cpu"),
      is_cuda_(type, "is_cuda"),
      is_floating_point_(type, "is_floating_point"),
      element_size_(type, "element_size") {
    for (int i = 0; i < 4; ++i) floats_[i] = nb::module_::import_("torch").attr(kNames[i]);
    const nb::object found = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(found.ptr(), "dlpack_exchange_api")) return;
    table_ = static_cast<const Table *>(PyCapsule_GetPointer(found.ptr(), "dlpack_exchange_api"));
    while (table_ && table_->major != kMajor) table_ = table_->before;
}

bool Tensors::look(PyObject *tensor, Look &to) const {
    if (!table_) return false;
    if (!table_->look(tensor, &to)) return true;
    // DLPack cannot describe this tensor; the caller reads its attributes.
    PyErr_Clear();
    return false;
}

bool Tensors::describe(PyObject *tensor, Description &to) const {
    Look found;
    if (look(tensor, found)) {
        if (found.lanes != 1 || (found.device_type != kCPU && found.device_type != kCUDA))
            return false;
        to.address = reinterpret_cast<uintptr_t>(found.data) + found.offset;
        to.dimensions = found.dimensions;
        to.shape = found.shape;
        to.strides = found.strides;
        to.kind = dtype_number(found.code, found.bits, found.lanes);
        to.bytes = (found.bits + 7) / 8;
        to.is_floating = found.code == kFloat || found.code == kBFloat;
        to.device = found.device_type == kCPU ? -1 : found.device;
        return true;
    }
    const bool on_cpu = holds_true(is_cpu_.of(tensor));
    if ((!on_cpu && !holds_true(is_cuda_.of(tensor))) || !layout_.of(tensor).is(strided_) ||
        holds_true(is_nested_.of(tensor)))
        return false;
    const nb::object dtype = dtype_.of(tensor), shape = shape_.of(tensor);
    const auto dimensions = static_cast<size_t>(PyTuple_Size(shape.ptr()));
    to.numbers.resize(2 * dimensions);
    numbers(shape, to.numbers.data());
    numbers(stride_.call(tensor), to.numbers.data() + dimensions);
    to.address = static_cast<uintptr_t>(number(data_ptr_.call(tensor)));
    to.dimensions = static_cast<int>(dimensions);
    to.shape = to.numbers.data();
    to.strides = to.shape + dimensions;
    to.bytes = number(element_size_.call(tensor));
    to.kind = 0;
    for (int i = 0; i < 4; ++i)
        if (dtype.is(floats_[i]))
            to.kind =
                dtype_number(i == 2 ? kBFloat : kFloat, static_cast<uint8_t>(8 * to.bytes), 1);
    to.is_floating = to.kind != 0;
    to.device = on_cpu ? -1 : number(get_device_.call(tensor));
    return true;
}

bool Tensors::are_indices(PyObject *o, Description &to) const {
    return reinterpret_cast<PyObject *>(Py_TYPE(o)) == type_.ptr() && describe(o, to) &&
           (to.kind == dtype_number(kInt, 64, 1) || (!to.kind && dtype_.of(o).is(int64_))) &&
           to.dimensions == 1 && to.is_contiguous();
}

bool Tensors::is_here(const Look &found) const {
    return device_ < 0 ? found.device_type == kCPU
                       : found.device_type == kCUDA && found.device == device_;
}

bool Tensors::view(PyObject *tensor, View &to, int dimensions) const {
    const int first = 3 - dimensions;
    to.shape[0] = 1;
    to.strides[0] = 0;
    Look found;
    if (look(tensor, found)) {
        const int kind = kind_of(found.code, found.bits, found.lanes);
        if (kind < 0 || !is_here(found) || found.dimensions != dimensions) return false;
        to.kind = static_cast<Float>(kind);
        to.address = reinterpret_cast<uintptr_t>(found.data) + found.offset;
        for (int i = 0; i < dimensions; ++i) {
            to.shape[first + i] = found.shape[i];
            to.strides[first + i] = found.strides[i];
        }
        return true;
    }
    const nb::object dtype = dtype_.of(tensor);
    int kind = 0;
    while (kind < 4 && !dtype.is(floats_[kind])) ++kind;
    if (kind == 4 || !layout_.of(tensor).is(strided_) || !holds_true(is_here_.of(tensor)) ||
        holds_true(is_nested_.of(tensor)) || number(get_device_.call(tensor)) != device_)
        return false;
    const nb::object shape = shape_.of(tensor);
    if (PyTuple_Size(shape.ptr()) != dimensions) return false;
    to.kind = static_cast<Float>(kind);
    numbers(shape, to.shape + first);
    numbers(stride_.call(tensor), to.strides + first);
    to.address = address(tensor);
    return true;
}

Place Tensors::place(PyObject *tensor) const {
    Place to{.address = address(tensor), .dtype = dtype_.of(tensor), .kind = 0};
    Look found;
    if (look(tensor, found)) {
        to.kind = dtype_number(found.code, found.bits, found.lanes);
        to.shape.assign(found.shape, found.shape + found.dimensions);
        to.strides.assign(found.strides, found.strides + found.dimensions);
        return to;
    }
    const nb::object shape = shape_.of(tensor);
    to.shape.resize(PyTuple_Size(shape.ptr()));
    to.strides.resize(to.shape.size());
    numbers(shape, to.shape.data());
    numbers(stride_.call(tensor), to.strides.data());
    return to;
}

bool Tensors::is_at(PyObject *tensor, const Place &place) const {
    Look found;
    if (look(tensor, found))
        return reinterpret_cast<uintptr_t>(found.data) + found.offset == place.address &&
               dtype_number(found.code, found.bits, found.lanes) == place.kind &&
               std::equal(place.shape.begin(), place.shape.end(), found.shape,
                          found.shape + found.dimensions) &&
               std::equal(place.strides.begin(), place.strides.end(), found.strides,
                          found.strides + found.dimensions);
    return dtype_.of(tensor).is(place.dtype) && address(tensor) == place.address &&
           are_numbers(shape_.of(tensor), place.shape) &&
           are_numbers(stride_.call(tensor), place.strides);
}

uintptr_t Tensors::address(PyObject *tensor) const {
    Look found;
    if (look(tensor, found)) return reinterpret_cast<uintptr_t>(found.data) + found.offset;
    return static_cast<uintptr_t>(number(data_ptr_.call(tensor)));
}

uint64_t Tensors::argument(PyObject *value) const {
    if (value == Py_None) return 0;
    if (PyLong_Check(value)) return static_cast<uint64_t>(number(nb::borrow(value)));
    return address(value);
}

}  // namespace kernel_runtime
