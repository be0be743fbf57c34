#include "quick.hpp"

#include <cstdlib>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

// Made once: the lookup of an attribute by an interned name is mostly a comparison of addresses.
struct Names {
    PyObject *dtype = PyUnicode_InternFromString("dtype");
    PyObject *is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject *shape = PyUnicode_InternFromString("shape");
    PyObject *version = PyUnicode_InternFromString("_version");
    PyObject *requires_grad = PyUnicode_InternFromString("requires_grad");
    PyObject *count = PyUnicode_InternFromString("count");
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *stride = PyUnicode_InternFromString("stride");
    PyObject *is_neg = PyUnicode_InternFromString("is_neg");
    PyObject *is_contiguous = PyUnicode_InternFromString("is_contiguous");
};

const Names &names() {
    static const Names found;
    return found;
}

nb::object checked(PyObject *result) {
    if (!result) throw nb::python_error();
    return nb::steal(result);
}

nb::object get(PyObject *o, PyObject *name) { return checked(PyObject_GetAttr(o, name)); }

nb::object call(PyObject *o, PyObject *name) {
    PyObject *arguments[1] = {o};
    return checked(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
}

int64_t number(const nb::object &o) {
    const int64_t found = PyLong_AsLongLong(o.ptr());
    if (found == -1 && PyErr_Occurred()) throw nb::python_error();
    return found;
}

bool holds_true(const nb::object &o) { return o.ptr() == Py_True; }

// Items of a tuple of integers.
template <int n>
void numbers(const nb::object &tuple, int64_t (&to)[n]) {
    for (int i = 0; i < n; ++i) {
        PyObject *item = PyTuple_GetItem(tuple.ptr(), i);
        if (!item) throw nb::python_error();
        to[i] = number(nb::borrow(item));
    }
}

int64_t address(PyObject *tensor) { return number(call(tensor, names().data_ptr)); }

const float *floats(PyObject *tensor) {
    return reinterpret_cast<const float *>(static_cast<uintptr_t>(address(tensor)));
}

std::string setting(const std::string &variable) {
    const char *found = std::getenv(variable.c_str());
    return found ? found : "";
}

bool is_set_to(const std::string &variable, const std::string &value) {
    const char *found = std::getenv(variable.c_str());
    return found ? value == found : value.empty();
}

}  // namespace

Quick::Quick(Stack *stack, const nb::sequence &weights, nb::object steps, const char *variable,
             nb::tuple torch, nb::object like)
    : stack_(stack),
      steps_(std::move(steps)),
      variable_(variable),
      setting_(setting(variable)),
      tensor_(torch[0]),
      float32_(torch[1]),
      empty_like_(torch[2]),
      is_grad_enabled_(torch[3]),
      get_num_threads_(torch[4]),
      like_(std::move(like)) {
    for (nb::handle w : weights)
        stamps_.push_back({w.ptr(), number(get(w.ptr(), names().version)), address(w.ptr())});
    if (!steps_.is_none()) count_ = number(get(steps_.ptr(), names().count));
}

bool Quick::holds(const nb::object &weights) const {
    if (!steps_.is_none() && number(get(steps_.ptr(), names().count)) != count_) return false;
    const nb::object found = checked(PyObject_GetIter(weights.ptr()));
    size_t i = 0;
    while (PyObject *item = PyIter_Next(found.ptr())) {
        const nb::object w = nb::steal(item);
        if (i == stamps_.size()) return false;
        const Stamp &stamp = stamps_[i++];
        if (item != stamp.tensor || number(get(item, names().version)) != stamp.version ||
            address(item) != stamp.address)
            return false;
    }
    if (PyErr_Occurred()) throw nb::python_error();
    return i == stamps_.size();
}

bool Quick::wants_gradient(PyObject *x, PyObject *hx) const {
    if (!holds_true(checked(PyObject_CallNoArgs(is_grad_enabled_.ptr())))) return false;
    auto wants = [](PyObject *tensor) { return holds_true(get(tensor, names().requires_grad)); };
    if (wants(x) || (hx && wants(hx))) return true;
    for (const Stamp &stamp : stamps_)
        if (wants(stamp.tensor)) return true;
    return false;
}

bool Quick::is_plain(PyObject *tensor, int64_t (&shape)[3]) const {
    if (reinterpret_cast<PyObject *>(Py_TYPE(tensor)) != tensor_.ptr() ||
        !get(tensor, names().dtype).is(float32_) || !holds_true(get(tensor, names().is_cpu)))
        return false;
    const nb::object sizes = get(tensor, names().shape);
    if (PyTuple_Size(sizes.ptr()) != 3) return false;
    numbers(sizes, shape);
    return true;
}

Quick::Likes Quick::likes(const int64_t (&shape)[3], bool batch_first) {
    if (shape[0] == likes_.first && shape[1] == likes_.second && batch_first == likes_.batch_first)
        return likes_;
    const int64_t H = stack_->layer(0, 0).H(), D = stack_->directions();
    const auto states = static_cast<int64_t>(stack_->depth()) * D;
    Likes made;
    made.first = shape[0];
    made.second = shape[1];
    made.batch_first = batch_first;
    made.y = like_(nb::make_tuple(shape[0], shape[1], D * H));
    made.last = like_(nb::make_tuple(states, shape[batch_first ? 0 : 1], H));
    // in one piece: another thread may come in wherever an object is released
    Likes before = made;
    std::swap(likes_, before);
    return made;
}

nb::object Quick::run(const nb::object &weights, const nb::object &x, const nb::object &hx,
                      bool batch_first) {
    const Layer &bottom = stack_->layer(0, 0);
    const int64_t H = bottom.H(), C = bottom.C(), D = stack_->directions();
    int64_t shape[3], step[3];
    PyObject *const h0 = hx.is_none() ? nullptr : hx.ptr();
    if (!is_plain(x.ptr(), shape)) return nb::none();
    const int64_t T = shape[batch_first ? 1 : 0], N = shape[batch_first ? 0 : 1];
    if (shape[2] != C || !T || !N) return nb::none();
    if (h0) {
        int64_t states[3];
        if (!is_plain(h0, states) || states[0] != static_cast<int64_t>(stack_->depth()) * D ||
            states[1] != N || states[2] != H)
            return nb::none();
    }
    if (!is_set_to(variable_, setting_) || !holds(weights) || wants_gradient(x.ptr(), h0))
        return nb::none();

    const bool is_dense = holds_true(call(x.ptr(), names().is_contiguous));
    if (is_dense) {
        step[0] = shape[1] * C;
        step[1] = C;
    } else {
        numbers(call(x.ptr(), names().stride), step);
        if (step[2] != 1) return nb::borrow(Py_NotImplemented);
    }
    if (holds_true(call(x.ptr(), names().is_neg)) ||
        (h0 &&
         (!holds_true(call(h0, names().is_contiguous)) || holds_true(call(h0, names().is_neg)))))
        return nb::borrow(Py_NotImplemented);

    const Likes likes = this->likes(shape, batch_first);
    auto make = [&](const nb::object &like) {
        PyObject *arguments[1] = {like.ptr()};
        return checked(PyObject_Vectorcall(empty_like_.ptr(), arguments, 1, nullptr));
    };
    const nb::object y = make(likes.y), last = make(likes.last);
    Stack::Call job;
    job.x = floats(x.ptr());
    job.x_step = step[batch_first ? 1 : 0];
    job.x_row = step[batch_first ? 0 : 1];
    job.h0 = h0 ? floats(h0) : nullptr;
    job.y = const_cast<float *>(floats(y.ptr()));
    job.y_step = (batch_first ? 1 : N) * D * H;
    job.y_row = (batch_first ? T : 1) * D * H;
    job.last = const_cast<float *>(floats(last.ptr()));
    job.T = T;
    job.N = N;
    job.threads = static_cast<int>(number(checked(PyObject_CallNoArgs(get_num_threads_.ptr()))));
    bool nan;
    {
        nb::gil_scoped_release release;
        nan = stack_->run(job);
    }
    if (nan) return nb::none();
    return nb::make_tuple(y, last);
}

}  // namespace quant_gru
