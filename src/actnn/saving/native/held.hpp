// The forms in which a saved tensor is held until backward.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "actnn/saving/native/torch_api.hpp"

namespace actnn {

// Bytes that are held for the backward passes to come.
struct Counter {
    int64_t bytes = 0;
};

// A number of bytes in a counter, as long as this exists.
class Share {
 public:
    Share(std::shared_ptr<Counter> counter, int64_t bytes)
        : counter_(std::move(counter)), bytes_(bytes) {
        counter_->bytes += bytes_;
    }
    ~Share() { counter_->bytes -= bytes_; }
    int64_t bytes() const { return bytes_; }
    const std::shared_ptr<Counter> &counter() const { return counter_; }
    void set(int64_t bytes) {
        counter_->bytes += bytes - bytes_;
        bytes_ = bytes;
    }
    Share(const Share &) = delete;
    Share &operator=(const Share &) = delete;

 private:
    std::shared_ptr<Counter> counter_;
    int64_t bytes_;
};

// The object of native code in one of Python whose class is exactly that of T; null in others.
template <class T>
T *as(const nanobind::handle &o) {
    static const PyObject *const type = nanobind::type<T>().ptr();
    return o.type().ptr() == type ? nanobind::inst_ptr<T>(o) : nullptr;
}

// Whether backward divides by tensors of a kind that codes do not tell from 0.
struct Use {
    nanobind::object path;         // of the module
    std::shared_ptr<bool> any;     // whether it does for any kind; none for what is always kept
    std::shared_ptr<bool> warned;  // whether a step was warned of whose codes were not exact enough
    bool divides = false;
    bool compared = false;       // whether backward compares such tensors with other tensors
    nanobind::object intervals;  // a dictionary of those with which backward compares; or null
    // Says with which intervals backward compares tensors of this kind; with none: with tensors.
    void compares(const nanobind::handle &with);
    // Returns the answer for what runs now; a warning names the path if there is one.
    bool ask(const nanobind::handle &tensor, int64_t bits, const nanobind::handle &path);
};

// The tensor itself. An in-place operation after saving is an error, as in plain PyTorch.
class Kept {
 public:
    // Returns an object of Python that has one. Most saved tensors are small or parameters, and an
    // instance of nanobind would cost as much as all the rest. is_leaf, version: of the tensor.
    static nanobind::object make(const nanobind::handle &tensor, bool is_leaf, int64_t version,
                                 int64_t held, std::shared_ptr<Counter> counter);
    // The class of these objects.
    static const nanobind::object &type();
    int64_t held() const { return share_.bytes(); }
    const nanobind::object &tensor() const { return tensor_; }
    // Returns the tensor, or a view of its elements; view: a Layout of Python, or None.
    nanobind::object unpack(const nanobind::handle &view) const;
    // Finds out what backward does with it: codes that are near it may have to be exact, too.
    void watch(std::shared_ptr<Use> use) { use_ = std::move(use); }
    // Lets unpack return the result of a function instead of the tensor.
    void replace(nanobind::object function) { instead_ = std::move(function); }

 private:
    Kept(nanobind::object tensor, int64_t version, int64_t held, std::shared_ptr<Counter> counter)
        : tensor_(std::move(tensor)), version_(version), share_(std::move(counter), held) {}

    nanobind::object tensor_, instead_;
    int64_t version_;
    std::shared_ptr<Use> use_;
    Share share_;
};
template <>
Kept *as<Kept>(const nanobind::handle &o);

// A tensor beside its codes, until it is known whether backward divides by it.
class Beside {
 public:
    Beside(const nanobind::handle &tensor, std::shared_ptr<Counter> counter);
    // Returns the tensor; null if it was changed in place since it was saved.
    nanobind::object get() const;
    bool is(const nanobind::handle &tensor) const { return tensor_.is(tensor); }

 private:
    nanobind::object tensor_;
    int64_t version_;
    Share share_;
};

// What a tensor was encoded to, and how it is decoded.
struct Encoded {
    nanobind::object codes, decode;  // a codec.Coder's, or alike
    nanobind::object sides;          // what `positive_mask` returned, or `Sides`, or None
    nanobind::object shape, strides, dtype;
    int64_t held, groups;  // bytes that are held; groups of codes
};

// Codes of the tensor, in storage order; they fit every dense view of the same elements.
class Compressed {
 public:
    Compressed(Encoded encoded, std::shared_ptr<Counter> counter)
        : encoded_(std::move(encoded)), share_(std::move(counter), encoded_.held) {}
    int64_t held() const { return share_.bytes(); }
    // Returns codes, the number of their groups and the shape of the tensor; None if it is exact.
    nanobind::object codes() const;
    // Holds another form of the tensor instead of the codes, such as the tensor itself.
    void keep(nanobind::object other);
    // Says that the tensor was saved more than once.
    void share() { is_shared_ = true; }
    // Finds out what backward does with codes of so many bits.
    void watch(std::shared_ptr<Use> use, int64_t bits) {
        use_ = std::move(use);
        bits_ = bits;
    }
    // Says that backward divides by the tensor, so that the next ones like it are to be exact.
    void divided() {
        if (use_ && use_->any) use_->divides = *use_->any = true;
    }
    // Says with which intervals backward compares the tensor, so that the next ones like it get
    // their sides.
    void compares(const nanobind::handle &with) {
        if (use_) use_->compares(with);
    }
    // Holds the tensor beside its codes, for the operations that divide by it; None: only codes.
    void hold_beside(const nanobind::handle &tensor) { beside_ = beside(tensor); }
    std::unique_ptr<Beside> beside(const nanobind::handle &tensor) const {
        return tensor.is_none() ? nullptr : std::make_unique<Beside>(tensor, share_.counter());
    }
    // Whether what unpack returned is the tensor beside the codes.
    bool is_beside(const nanobind::handle &tensor) const { return beside_ && beside_->is(tensor); }
    // Returns the decoded tensor, or a view of it; one that is still alive is used again. exact:
    // the same, not rounded, or null.
    nanobind::object unpack(const nanobind::handle &view, const Beside *exact);
    nanobind::object unpack(const nanobind::handle &view) {
        return unpack(view, view.is_none() ? beside_.get() : nullptr);
    }

 private:
    Encoded encoded_;
    Share share_;
    nanobind::object other_;
    // An autograd node that saved one tensor twice unpacks it twice before it runs. The weak
    // reference does not prolong the life of the first, so that the peak stays.
    bool is_shared_ = false;
    WeakStorage decoded_;
    std::shared_ptr<Use> use_;
    int64_t bits_ = 0;
    std::unique_ptr<Beside> beside_;
};

// A view of elements that are held once.
class View {
 public:
    View(nanobind::object held, nanobind::object layout)
        : held_(std::move(held)), layout_(std::move(layout)) {}
    // Holds another form of the tensor of this layout.
    void keep(nanobind::object other);
    // Says that backward divides by the tensor, so that the next ones like it are to be exact.
    void divided() {
        if (auto *const codes = as<Compressed>(held_)) codes->divided();
    }
    void compares(const nanobind::handle &with) {
        if (auto *const codes = as<Compressed>(held_)) codes->compares(with);
    }
    // Holds the view beside the codes, as there.
    void hold_beside(const nanobind::handle &tensor) {
        if (auto *const codes = as<Compressed>(held_)) beside_ = codes->beside(tensor);
    }
    bool is_beside(const nanobind::handle &tensor) const { return beside_ && beside_->is(tensor); }
    nanobind::object codes() const;
    nanobind::object unpack() const;

 private:
    nanobind::object held_, layout_;
    std::unique_ptr<Beside> beside_;
};

// Returns what is held as a tensor; also of forms that are written in Python.
nanobind::object unpack(const nanobind::handle &held, const nanobind::handle &view);

// Returns the same for the operation whose backward runs. What it has saved is limited if it is a
// norm, but not what others have saved and read meanwhile: a block that runs again, say.
nanobind::object unpack_for_backward(const nanobind::handle &held);

// Functions of Python that the forms call, and names of nodes; saving/step.py tells them.
struct HeldRules {
    nanobind::object refuse_changed, refuse_second_derivative, restore_sides, view_of_storage,
        norms, limit_normalized, divides;
};
HeldRules &held_rules();

}  // namespace actnn
