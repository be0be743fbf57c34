#include "bindings/prepared_call.hpp"

#include <cstdlib>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

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
             nb::tuple torch, nb::object parts)
    : stack_(stack),
      tensors_(torch[0], -1),
      weights_(tensors_, weights, std::move(steps)),
      variable_(variable),
      setting_(setting(variable)),
      is_grad_enabled_(torch[1]),
      get_num_threads_(torch[2]),
      parts_(std::move(parts)) {}

bool Quick::wants_gradient(PyObject *x, PyObject *hx) const {
    return holds_true(call(is_grad_enabled_)) &&
           (tensors_.requires_grad(x) || (hx && tensors_.requires_grad(hx)) ||
            weights_.ask_for_gradient(tensors_));
}

Quick::Makers Quick::makers(const int64_t (&shape)[3], bool batch_first) {
    if (shape[0] == makers_.first && shape[1] == makers_.second &&
        batch_first == makers_.batch_first)
        return makers_;
    const int64_t H = stack_->layer(0, 0).H(), D = stack_->directions();
    const auto states = static_cast<int64_t>(stack_->depth()) * D;
    auto maker = [&](int64_t a, int64_t b, int64_t c) {
        const auto parts = nb::cast<nb::tuple>(parts_(nb::make_tuple(a, b, c)));
        return Maker(parts[0], nb::cast<nb::tuple>(parts[1]));
    };
    Makers made;
    made.first = shape[0];
    made.second = shape[1];
    made.batch_first = batch_first;
    made.y = maker(shape[0], shape[1], D * H);
    made.last = maker(states, shape[batch_first ? 0 : 1], H);
    // in one piece: another thread may come in wherever an object is released
    Makers before = made;
    std::swap(makers_, before);
    return made;
}

nb::object Quick::run(const nb::object &weights, const nb::object &x, const nb::object &hx,
                      bool batch_first) {
    const Layer &bottom = stack_->layer(0, 0);
    const int64_t H = bottom.H(), C = bottom.C(), D = stack_->directions();
    PyObject *const h0 = hx.is_none() ? nullptr : hx.ptr();
    View in, before;
    if (!tensors_.is_plain(x.ptr(), in)) return nb::none();
    const auto &shape = in.shape;
    const int64_t T = shape[batch_first ? 1 : 0], N = shape[batch_first ? 0 : 1];
    if (shape[2] != C || !T || !N) return nb::none();
    if (h0) {
        const auto states = static_cast<int64_t>(stack_->depth()) * D;
        if (!tensors_.is_plain(h0, before) || before.shape[0] != states || before.shape[1] != N ||
            before.shape[2] != H)
            return nb::none();
    }
    if (!is_set_to(variable_, setting_) || !weights_.hold(tensors_, weights) ||
        wants_gradient(x.ptr(), h0))
        return nb::none();
    if ((in.strides[2] != 1 && C != 1) || tensors_.is_neg(x.ptr()) ||
        (h0 && (!before.is_contiguous() || tensors_.is_neg(h0))))
        return nb::borrow(Py_NotImplemented);

    const Makers makers = this->makers(shape, batch_first);
    const nb::object y = makers.y(), last = makers.last();
    Stack::Call job;
    job.x = reinterpret_cast<const float *>(in.address);
    job.x_step = in.strides[batch_first ? 1 : 0];
    job.x_row = in.strides[batch_first ? 0 : 1];
    job.h0 = h0 ? reinterpret_cast<const float *>(before.address) : nullptr;
    job.y = reinterpret_cast<float *>(tensors_.address(y.ptr()));
    job.y_step = (batch_first ? 1 : N) * D * H;
    job.y_row = (batch_first ? T : 1) * D * H;
    job.last = reinterpret_cast<float *>(tensors_.address(last.ptr()));
    job.T = T;
    job.N = N;
    job.threads = static_cast<int>(number(call(get_num_threads_)));
    {
        nb::gil_scoped_release release;
        stack_->run(job);
    }
    return nb::make_tuple(y, last);
}

}  // namespace quant_gru
