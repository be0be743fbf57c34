#include "bindings/cuda_backward.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {

Repeated::Repeated(Launches &launches, const Sizes &sizes, std::vector<Layout> layouts,
                   const std::vector<nb::object> &makers, const nb::tuple &torch, nb::object fail,
                   nb::object keep)
    : launches_(launches),
      sizes_(sizes),
      tensors_(torch[0], sizes.device),
      layouts_(std::move(layouts)),
      current_device_(torch[1]),
      stream_(nb::cast<nb::tuple>(torch[2])),
      is_capturing_(torch[3]),
      fail_(std::move(fail)),
      keep_(std::move(keep)),
      workspace_(sizes.most) {
    for (const nb::object &each : makers) {
        if (each.is_none()) {
            makers_.emplace_back();
        } else {
            const nb::tuple parts = nb::cast<nb::tuple>(each);
            makers_.emplace_back(Maker(nb::borrow(parts[0]), nb::cast<nb::tuple>(parts[1])));
        }
    }
}

bool Repeated::lies(const nb::object &tensor, const Layout &layout, uintptr_t &address) const {
    if (tensor.is_none()) return layout.shape.empty();
    View found;
    if (layout.shape.empty() || !tensors_.is_plain(tensor.ptr(), found) ||
        tensors_.is_neg(tensor.ptr()))
        return false;
    for (int i = 0; i < 3; ++i)
        if (found.shape[i] != layout.shape[i] ||
            (found.shape[i] != 1 && found.strides[i] != layout.strides[i]))
            return false;
    address = found.address;
    return true;
}

nb::object Repeated::memory(uintptr_t stream, uintptr_t &address) {
    if (!holds_true(call(is_capturing_)))
        return workspace_.take(sizes_.space, stream, *makers_[0], tensors_, address);
    // that of a graph is the graph's
    nb::object made = (*makers_[0])();
    address = tensors_.address(made.ptr());
    return made;
}

nb::object Repeated::run(const nb::object &given_x, const nb::object &given_h0,
                         const nb::object &given_out, const nb::object &given_nan,
                         const nb::object &given_grad_out, const nb::object &given_grad_last) {
    std::vector<uintptr_t> to(kinds, 0);
    if (!lies(given_x, layouts_[0], to[x]) || !lies(given_grad_out, layouts_[1], to[grad_out]) ||
        !lies(given_grad_last, layouts_[2], to[grad_last]) ||
        !tensors_.is_contiguous(given_out.ptr()) || number(call(current_device_)) != sizes_.device)
        return nb::none();
    const uintptr_t stream = stream_();
    const nb::object workspace = memory(stream, to[space]);
    nb::object made[gradients];
    for (int i = 0; i < gradients; ++i) {
        made[i] = nb::none();
        if (!makers_[1 + i]) continue;
        made[i] = (*makers_[1 + i])();
        to[grad_x + i] = tensors_.address(made[i].ptr());
    }
    if (!given_h0.is_none()) to[h0] = tensors_.address(given_h0.ptr());
    to[out] = tensors_.address(given_out.ptr());
    to[nan] = tensors_.address(given_nan.ptr());
    if (given_grad_out.is_none()) to[grad_out] = sizes_.zero;
    to[dh0] = to[space] + static_cast<uintptr_t>(sizes_.dh0);
    int status;
    {
        // a queue that is full may wait for a host function that wants the interpreter's lock
        nb::gil_scoped_release release;
        status = launches_.start_at(stream, to);
    }
    if (status) {
        fail_(status);
        throw std::runtime_error("a launch failed");
    }
    return nb::make_tuple(made[0], made[1], made[2], made[3], made[4]);
}

}  // namespace quant_gru
