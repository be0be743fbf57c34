#include "bindings/cuda_backward.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {

GPUBackward::GPUBackward(Steps &steps, const Sizes &sizes, std::vector<Layout> layouts,
                         const std::vector<nb::object> &makers, const nb::tuple &torch)
    : steps_(steps),
      sizes_(sizes),
      tensors_(torch[0], sizes.device),
      layouts_(std::move(layouts)),
      current_device_(torch[1]),
      stream_(nb::cast<nb::tuple>(torch[2])),
      is_capturing_(torch[3]),
      workspace_(sizes.most) {
    for (const nb::object &each : makers) {
        if (each.is_none())
            makers_.emplace_back();
        else
            makers_.emplace_back(Maker(each));
    }
    if (steps.tensors() > outs + makers_.size() - 1 + static_cast<size_t>(sizes.cells))
        throw std::out_of_range("Expected fields to follow a tensor of the call");
}

bool GPUBackward::lies(const nb::object &tensor, const Layout &layout, View &found) const {
    if (tensor.is_none()) return layout.shape.empty();
    const size_t dimensions = layout.shape.size();
    if (!dimensions || !tensors_.is_plain(tensor.ptr(), found, static_cast<int>(dimensions)) ||
        found.kind != layout.kind || tensors_.is_neg(tensor.ptr()))
        return false;
    for (size_t i = 0; i < dimensions; ++i) {
        const size_t at = 3 - dimensions + i;
        const bool any = dimensions == 2 && !i;
        if ((!any && found.shape[at] != layout.shape[i]) ||
            (found.shape[at] != 1 && found.strides[at] != layout.strides[i]))
            return false;
    }
    return true;
}

bool GPUBackward::follows(const nb::object &tensor, uintptr_t &address) const {
    address = tensors_.address(tensor.ptr());
    return tensors_.is_contiguous(tensor.ptr());
}

bool GPUBackward::find(const Given &given, std::vector<uintptr_t> &at, int64_t &rows) const {
    const nb::object *const tensors[] = {&given.x, &given.h0, &given.grad_y, &given.grad_last};
    constexpr size_t to[] = {x, h0, grad_y, grad_last};
    View found[4] = {};
    for (size_t i = 0; i < 4; ++i) {
        if (!lies(*tensors[i], layouts_[i], found[i])) return false;
        at[to[i]] = found[i].address;
    }
    rows = found[0].shape[1];
    const auto packing = Packing::of(given.packing, tensors_);
    if (packing.has_value() != sizes_.is_packed) return false;
    if (packing) {
        if (packing->T != sizes_.T || packing->N != sizes_.N ||
            (found[2].address && found[2].shape[1] != rows))
            return false;
        at[lengths] = packing->layout;
        at[sorted] = packing->sorted;
        at[unsorted] = packing->unsorted;
    }
    return follows(given.nan, at[nan]) &&
           all_hold(given.outs, static_cast<size_t>(sizes_.cells), [&](PyObject *out, size_t i) {
               return follows(nb::borrow(out), at[outs + i]);
           });
}

nb::object GPUBackward::memory(uintptr_t stream, uintptr_t &address) {
    if (!holds_true(call(is_capturing_)))
        return workspace_.take(sizes_.space, stream, *makers_[0], tensors_, address);
    // A captured graph owns its workspace, so the kept one is not used.
    nb::object made = (*makers_[0])();
    address = tensors_.address(made.ptr());
    return made;
}

nb::object GPUBackward::run(const Given &given) {
    const size_t first = outs + static_cast<size_t>(sizes_.cells);
    std::vector<uintptr_t> at(first + makers_.size() - 1, 0);
    int64_t rows = 0;
    if (!find(given, at, rows) || number(call(current_device_)) != sizes_.device) return nb::none();
    const uintptr_t stream = stream_();
    const nb::object workspace = memory(stream, at[space]);
    nb::list found;
    for (size_t i = 1; i < makers_.size(); ++i) {
        const nb::object made = !makers_[i]                  ? nb::none()
                                : i == 1 && sizes_.is_packed ? makers_[i]->of_rows(rows)
                                                             : (*makers_[i])();
        if (makers_[i]) at[first + i - 1] = tensors_.address(made.ptr());
        found.append(made);
    }
    steps_.start(stream, at, nb::make_tuple(workspace, found), nullptr, [] {});
    return found;
}

}  // namespace quant_gru
