// What a step does with a tensor that may be compressed.
#include <algorithm>

#include "actnn/saving/native/step.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

// Of the address and the elements of tensors that kernels handle in tiles.
constexpr int64_t kAlignment = 16, kMostAligned = int64_t{1} << 35;

}  // namespace

Decisions::Form Decisions::form_of(const Look &look, size_t n) {
    const Description &d = look.d;
    PyObject *const tensor = look.tensor.ptr();
    const auto read = [&] { return Form{torch().shape.of(tensor), torch().dtype.of(tensor)}; };
    if (!look.is_described || !d.kind) return read();
    if (n < recent_.size()) {
        const std::vector<int64_t> &key = recent_[n]->first;
        if (key[0] == d.kind &&
            std::equal(key.begin() + 1, key.end(), d.shape, d.shape + d.dimensions))
            return recent_[n]->second;
    }
    std::vector<int64_t> key{d.kind};
    key.insert(key.end(), d.shape, d.shape + d.dimensions);
    const auto found = forms_.try_emplace(std::move(key)).first;
    if (!found->second.shape.is_valid()) found->second = read();
    if (n >= recent_.size()) recent_.resize(n + 1, &*found);
    recent_[n] = &*found;
    return found->second;
}

Decision Step::decide(const Look &whole, const Look &part, const Where &where,
                      const nb::object &exact, const nb::object &op, const Decision *&cached) {
    const bool heads = part.d.dimensions == 4 && !part.base().is_none() && !part.d.is_contiguous();
    const nb::object kind = nb::borrow(reinterpret_cast<PyObject *>(Py_TYPE(where.module.ptr())));
    PyObject *const path = decides_by_path_ ? where.path.ptr() : nullptr;
    const Decisions::Key key{whole.op,     part.op, path,           kind.ptr(),
                             whole.d.kind, heads,   where.boundary, !exact.is_none()};
    const bool caches = caches_ && op.is_none();
    if (caches) {
        const auto found = decisions_.decisions.find(key);
        if (found != decisions_.decisions.end()) {
            cached = &found->second;
            return found->second;
        }
    }
    const nb::object answer = self().attr("_decide")(whole.tensor, part.tensor, where.path, op,
                                                     where.boundary, exact, where.module);
    const Decision decision{static_cast<Decision::Action>(nb::cast<int>(answer[0])),
                            answer[1],
                            answer[2],
                            answer[3],
                            nb::cast<int64_t>(answer[4]),
                            nb::cast<bool>(answer[5])};
    if (caches) {
        decisions_.named.push_back(where.path);
        decisions_.named.push_back(kind);
        cached = &decisions_.decisions.emplace(key, decision).first->second;
    }
    return decision;
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
        std::vector<int64_t> layout(d.shape, d.shape + d.dimensions);
        layout.insert(layout.end(), d.strides, d.strides + d.dimensions);
        const bool aligned = d.address % kAlignment == 0 && d.elements() < kMostAligned;
        Decisions::CoderKey key{cached, decision.bits, std::move(layout), d.device, aligned};
        coder = &decisions_.coders[std::move(key)];
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
    if (decision.positive && dense)
        sides = self().attr("_positive")(tensor);
    else if (intervals.is_valid() && dense)
        sides = self().attr("_sides")(tensor, intervals);
    if (!sides.is_none()) held += nb::cast<int64_t>(sides.attr("nbytes"));
    Encoded encoded{codes,          coder->decode, sides, coder->shape,
                    coder->strides, coder->dtype,  held,  coder->groups};
    return nb::cast(new Compressed(std::move(encoded), counter_), nb::rv_policy::take_ownership);
}

}  // namespace actnn
