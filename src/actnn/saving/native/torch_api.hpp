// What this package uses of torch, looked up once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "kernel_runtime/native/python_objects.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace actnn {

using kernel_runtime::Attribute;
using kernel_runtime::call;
using kernel_runtime::checked;
using kernel_runtime::Description;
using kernel_runtime::holds_true;
using kernel_runtime::number;
using kernel_runtime::Tensors;

struct Torch {
    Torch();

    nanobind::object tensor, parameter;
    Tensors tensors;
    Attribute storage, grad_fn, base, requires_grad, is_leaf, detach, shape, stride, dtype, device,
        storage_offset, is_neg, is_conj;
    Attribute address, weak_ref, nbytes;  // of a storage
    nanobind::object free_weak_ref, from_weak_ref, is_grad_enabled, graph_task, current_node,
        as_strided, clone;

    // Whether an object is a Tensor or a Parameter, and of no other subclass.
    bool is_plain(PyObject *o) const {
        const auto type = reinterpret_cast<PyObject *>(Py_TYPE(o));
        return type == tensor.ptr() || type == parameter.ptr();
    }
    bool is_parameter(PyObject *o) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(o)) == parameter.ptr();
    }
    uintptr_t address_of(const nanobind::object &storage) const {
        return static_cast<uintptr_t>(number(address.of(storage.ptr())));
    }
};

// Made at the first use, never destroyed: objects of Python must not outlive the interpreter.
const Torch &torch();

// A weak reference to a storage: while it exists, no other storage has its address.
class WeakStorage {
 public:
    WeakStorage() = default;
    explicit WeakStorage(const nanobind::object &storage);
    WeakStorage(WeakStorage &&other) noexcept : reference_(other.reference_) {
        other.reference_ = 0;
    }
    WeakStorage &operator=(WeakStorage &&other) noexcept {
        std::swap(reference_, other.reference_);
        return *this;
    }
    ~WeakStorage();
    explicit operator bool() const { return reference_ != 0; }
    // The storage, or None if it is gone.
    nanobind::object get() const;

 private:
    uintptr_t reference_ = 0;
};

}  // namespace actnn
