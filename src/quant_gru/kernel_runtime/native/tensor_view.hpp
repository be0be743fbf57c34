// Access to torch tensors from native code: through torch's table of C functions for DLPack if
// there is one, otherwise through Python attributes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "kernel_runtime/native/python_objects.hpp"

namespace kernel_runtime {

// The dtypes of real values.
enum class Float : int { float32, float16, bfloat16, float64 };

// Address, dtype and layout of a tensor of real values with three dimensions. A tensor with two
// dimensions has shape[0] = 1.
struct View {
    uintptr_t address;
    Float kind;
    int64_t shape[3], strides[3];

    bool is_contiguous() const;
};

// Address, dtype and layout of a tensor of any dtype.
struct Place {
    uintptr_t address;
    nanobind::object dtype;
    uint32_t kind;  // the dtype in DLPack's numbers; 0 if DLPack cannot describe the tensor
    std::vector<int64_t> shape, strides;
};

// Shape and layout of a tensor of any kind. The numbers are valid while the tensor is alive.
struct Description {
    uintptr_t address;
    int dimensions;
    const int64_t *shape, *strides;
    uint32_t kind;  // the dtype in DLPack's numbers
    int64_t bytes;  // of an element
    bool is_floating;
    int64_t device;                // below 0 for the CPU
    std::vector<int64_t> numbers;  // shape and strides, if torch has no table of functions

    int64_t elements() const;
    // Whether the elements fill their memory without gaps or overlap, in any order.
    bool is_dense() const;
    bool is_contiguous() const;
};

class Tensors {
 public:
    // type: torch.Tensor. device: get_device() of the tensors, below 0 for the CPU.
    Tensors(const nanobind::handle &type, int64_t device);

    // Whether `o` is exactly of this type (no subclass), has real values, is on the device, and has
    // `dimensions` (2 or 3) dimensions. If so, fills `to`.
    bool is_plain(PyObject *o, View &to, int dimensions = 3) const {
        return reinterpret_cast<PyObject *>(Py_TYPE(o)) == type_.ptr() && view(o, to, dimensions);
    }
    // The same for a Tensor or an instance of a subclass.
    bool view(PyObject *tensor, View &to, int dimensions = 3) const;
    uintptr_t address(PyObject *tensor) const;
    // What a kernel gets for a value: a tensor stands for its address, None for a null pointer, an
    // integer for itself.
    uint64_t argument(PyObject *value) const;
    Place place(PyObject *tensor) const;
    // Describes a strided tensor on a CPU or GPU; false for others.
    bool describe(PyObject *tensor, Description &to) const;
    // Whether `o` is exactly of this type, and contiguous int64 with one dimension, on any device.
    bool are_indices(PyObject *o, Description &to) const;
    // Whether a Tensor has this address, dtype and layout.
    bool is_at(PyObject *tensor, const Place &place) const;
    bool is_contiguous(PyObject *tensor) const { return holds_true(is_contiguous_.call(tensor)); }
    int64_t version(PyObject *tensor) const { return number(version_.of(tensor)); }
    bool requires_grad(PyObject *tensor) const { return holds_true(requires_grad_.of(tensor)); }
    // Whether readers must negate the elements (torch's negative bit).
    bool is_neg(PyObject *tensor) const { return holds_true(is_neg_.call(tensor)); }
    int64_t device() const { return device_; }

 private:
    // The head of DLPack's function table, and DLPack's description of a tensor.
    struct Table {
        uint32_t major, minor;
        Table *before;
        void *allocate, *from_object, *to_object;
        int (*look)(void *object, void *to);
    };
    struct Look {
        void *data;
        int32_t device_type, device;
        int32_t dimensions;
        uint8_t code, bits;
        uint16_t lanes;
        const int64_t *shape, *strides;
        uint64_t offset;
    };

    bool look(PyObject *tensor, Look &to) const;
    bool is_here(const Look &found) const;

    int64_t device_;
    const Table *table_ = nullptr;
    nanobind::object type_, floats_[4], int64_, strided_;
    Attribute dtype_, layout_, is_here_, shape_, version_, requires_grad_, data_ptr_, stride_,
        is_neg_, get_device_, is_contiguous_, is_nested_, is_cpu_, is_cuda_, is_floating_point_,
        element_size_;
};

// Makes tensors of one kind.
class Maker {
 public:
    Maker() = default;
    // A functools.partial without keywords becomes its function and arguments, which are faster to
    // call.
    explicit Maker(nanobind::object function) : function_(std::move(function)) {
        if (nanobind::hasattr(function_, "func") && !nanobind::bool_(function_.attr("keywords"))) {
            arguments_ = nanobind::cast<nanobind::tuple>(function_.attr("args"));
            function_ = function_.attr("func");
        }
    }
    nanobind::object operator()() const {
        return checked(PyObject_Call(function_.ptr(), arguments_.ptr(), nullptr));
    }
    // Makes a tensor with `rows` rows; the function takes only this number.
    nanobind::object of_rows(int64_t rows) const { return function_(rows); }

 private:
    nanobind::object function_;
    nanobind::tuple arguments_;
};

}  // namespace kernel_runtime
