// What a step does with a tensor that may be compressed.
#include <algorithm>

#include "actnn/saving/native/step.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

// Of the address and the elements of tensors that kernels handle in tiles.
constexpr int64_t kAlignment = 16, kMostAligned = int64_t{1} << 35;

}  // namespace

Decision Step::decide(const Look &whole, const Look &part, const Where &where,
                      const nb::object &exact, const nb::object &op, const Decision *&cached) {
    const bool heads = part.d.dimensions == 4 && !part.base().is_none() && !part.d.is_contiguous();
    const nb::object kind = nb::borrow(reinterpret_cast<PyObject *>(Py_TYPE(where.module.ptr())));
    PyObject *const path = decides_by_path_ ? where.path.ptr() : nullptr;
    const Decisions::Key key{whole.op(),   part.op(), path,           kind.ptr(),
                             whole.d.kind, heads,     where.boundary, !exact.is_none()};
    const bool caches = caches_ && op.is_none();
    Decision fresh;
    Decision *decision = &fresh;
    if (caches) {
        decision = &decisions_.decisions.at(records_.size(), key);
        cached = decision;
        if (decision->choice.is_valid()) return *decision;
        decisions_.named.push_back(where.path);
        decisions_.named.push_back(kind);
    }
    const nb::object answer = self().attr("_decide")(whole.tensor, part.tensor, where.path, op,
                                                     where.boundary, exact, where.module);
    *decision = {static_cast<Decision::Action>(nb::cast<int>(answer[0])),
                 answer[1],
                 answer[2],
                 answer[3],
                 nb::cast<int64_t>(answer[4]),
                 nb::cast<bool>(answer[5])};
    return *decision;
}

nb::object Step::encode(const Look &look, bool dense, const Decision &decision,
                        const Decision *cached, const nb::object &intervals) {
    const Torch &t = torch();
    const Description &d = look.d;
    const nb::object &tensor = look.tensor;
    const nb::object source = dense ? tensor : t.detach.call(tensor.ptr()).attr("contiguous")();
    Coder fresh;
    Coder *coder = &fresh;
    if (cached && dense) {
        const bool aligned = d.address % kAlignment == 0 && d.elements() < kMostAligned;
        std::vector<int64_t> layout(d.shape, d.shape + d.dimensions);
        layout.insert(layout.end(), d.strides, d.strides + d.dimensions);
        const Decisions::CoderKey key{cached, decision.bits, std::move(layout), d.device, aligned};
        coder = &decisions_.coders.at(records_.size(), key);
    }
    if (!coder->encode.is_valid()) {  // new, or an error came the last time
        const nb::object found = self().attr("_coder")(source, decision.bits, decision.bounds);
        *coder = {found[0],
                  found[1],
                  found[2],
                  found[3],
                  t.dtype.of(tensor.ptr()),
                  nb::cast<int64_t>(found[4]),
                  nb::cast<int64_t>(found[5])};
    }
    nb::object &state = states_[d.device];
    if (!state.is_valid()) state = self().attr("_noise_state")(t.device.of(tensor.ptr()));
    const nb::object codes = coder->encode(source, state, next());
    nb::object sides = nb::none();
    int64_t held = coder->held;
    if (decision.positive)
        sides = self().attr("_positive")(source);
    else if (intervals.is_valid())
        sides = self().attr("_sides")(source, intervals);
    if (!sides.is_none()) held += nb::cast<int64_t>(sides.attr("nbytes"));
    Encoded encoded{codes,          coder->decode, sides, coder->shape,
                    coder->strides, coder->dtype,  held,  coder->groups};
    return nb::cast(new Compressed(std::move(encoded), counter_), nb::rv_policy::take_ownership);
}

}  // namespace actnn
