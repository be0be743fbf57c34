#include "bindings/cuda_call.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {

uintptr_t CurrentStream::operator()() {
    const auto now = static_cast<uintptr_t>(number(call(get_)));
    if (now != before_) {
        follow_();
        before_ = now;
    }
    return now;
}

nb::object Workspace::take(int64_t size, uintptr_t stream, const Maker &make,
                           const Tensors &tensors, uintptr_t &address) {
    if (size <= size_ && stream == stream_) {
        address = address_;
        return tensor_;
    }
    nb::object made = make();
    address = tensors.address(made.ptr());
    if (size <= most_) {
        size_ = size;
        stream_ = stream;
        address_ = address;
        // Last, because freeing the previous tensor may let other threads run.
        nb::object before = made;
        std::swap(tensor_, before);
    }
    return made;
}

std::optional<Packing> Packing::of(const nb::object &packing, const Tensors &tensors) {
    if (packing.is_none()) return std::nullopt;
    const nb::tuple parts = nb::cast<nb::tuple>(packing);
    auto at = [&](const nb::object &order) {
        return order.is_none() ? 0 : tensors.address(order.ptr());
    };
    return Packing{number(parts[0]), number(parts[1]), at(parts[2]), at(parts[3]), at(parts[4])};
}

bool Workspace::forget() {
    size_ = -1;
    nb::object before;
    std::swap(tensor_, before);
    return before.is_valid();
}

Call::Call(Steps &steps, const std::vector<Input> &inputs, int64_t features, int64_t bytes,
           std::vector<Maker> makers, const Tensors &tensors, const CurrentStream &stream)
    : steps_(steps),
      inputs_(inputs),
      features_(features),
      bytes_(bytes),
      tensors_(tensors),
      makers_(std::move(makers)),
      stream_(stream) {
    if (steps.tensors() > kinds)
        throw std::out_of_range("Expected fields to follow a tensor of the call");
}

void Call::move_input(uintptr_t address, int64_t step, int64_t next) {
    const bool aligned = !(address % 16 || step % 4 || next % 4 || features_ % 4);
    if (step == step_ && next == next_ && aligned == aligned_) return;
    step_ = step;
    next_ = next;
    aligned_ = aligned;
    for (const Input &each : inputs_) {
        *reinterpret_cast<int64_t *>(each.step) = step;
        *reinterpret_cast<int64_t *>(each.next) = next;
        if (each.fours) *reinterpret_cast<int32_t *>(each.fours) = aligned;
    }
}

nb::object Call::run(const Given &given, Workspace *kept) {
    const View &x_view = given.x_view;
    if ((x_view.strides[2] != 1 && features_ != 1) || tensors_.is_neg(given.x) ||
        (given.h0 && (!given.h0_view.is_contiguous() || tensors_.is_neg(given.h0))))
        return nb::borrow(Py_NotImplemented);

    const bool keeps = makers_.size() > 4;
    const uintptr_t stream = stream_();
    std::vector<uintptr_t> to(kinds, 0);
    auto at = [&](const nb::object &tensor) { return tensors_.address(tensor.ptr()); };
    const nb::object y =
        given.packing ? makers_[1].of_rows(x_view.shape[1]) : makers_[given.rows_first]();
    const nb::object last = makers_[2]();
    nb::object nan, codes, space;
    if (keeps) {
        nan = makers_[4]();
        codes = makers_[5]();
        to[Call::nan] = at(nan);
        to[Call::codes] = at(codes);
    }
    if (kept) {
        space = kept->take(bytes_, stream, makers_[3], tensors_, to[Call::space]);
    } else {
        space = makers_[3]();
        to[Call::space] = at(space);
    }
    to[Call::x] = x_view.address;
    if (given.h0) to[Call::h0] = given.h0_view.address;
    if (given.lengths) to[Call::lengths] = tensors_.address(given.lengths);
    if (given.packing) {
        to[Call::lengths] = given.packing->layout;
        to[Call::sorted] = given.packing->sorted;
        to[Call::unsorted] = given.packing->unsorted;
    }
    to[Call::y] = at(y);
    to[Call::last] = at(last);
    const int64_t step = x_view.strides[given.rows_first], next = x_view.strides[!given.rows_first];
    to.insert(to.end(), {static_cast<uintptr_t>(step), static_cast<uintptr_t>(next)});
    steps_.start(stream, to, nb::make_tuple(space, nb::none()), kept ? &kept->mutex() : nullptr,
                 [&] { move_input(x_view.address, step, next); });
    return keeps ? nb::make_tuple(y, last, nan, codes) : nb::make_tuple(y, last);
}

}  // namespace quant_gru
