// What a step does with a tensor that may be compressed.
#include "actnn/saving/native/step.hpp"

namespace nb = nanobind;

namespace actnn {
namespace {

// Of the address and the elements of tensors that kernels handle in tiles.
constexpr int64_t kAlignment = 16, kMostAligned = int64_t{1} << 35;

}  // namespace

Decisions::Form Decisions::form_of(const nb::handle &tensor) {
    const Torch &t = torch();
    const auto read = [&] { return Form{t.shape.of(tensor.ptr()), t.dtype.of(tensor.ptr())}; };
    Description d;
    if (!t.is_plain(tensor.ptr()) || !t.tensors.describe(tensor.ptr(), d) || !d.kind) return read();
    form_.assign(1, d.kind);
    form_.insert(form_.end(), d.shape, d.shape + d.dimensions);
    Form &found = forms_[form_];
    if (!found.shape.is_valid()) found = read();
    return found;
}

Decision Step::decide(const nb::handle &whole, const Description &d, const Op *made_by,
                      const nb::handle &part, const Description &part_d, const Op *part_by,
                      const Where &where, const nb::object &exact, const nb::object &op,
                      const Decision *&cached) {
    const Torch &t = torch();
    const bool heads =
        part_d.dimensions == 4 && !t.base.of(part.ptr()).is_none() && !part_d.is_contiguous();
    const nb::object kind = nb::borrow(reinterpret_cast<PyObject *>(Py_TYPE(where.module.ptr())));
    PyObject *const path = decides_by_path_ ? where.path.ptr() : nullptr;
    const Decisions::Key key{made_by, part_by, path,           kind.ptr(),
                             d.kind,  heads,   where.boundary, !exact.is_none()};
    const bool caches = caches_ && op.is_none();
    if (caches) {
        const auto found = decisions_.decisions.find(key);
        if (found != decisions_.decisions.end()) {
            cached = &found->second;
            return found->second;
        }
    }
    const nb::object answer =
        self().attr("_decide")(whole, part, where.path, op, where.boundary, exact, where.module);
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

nb::object Step::encode(const nb::handle &tensor, const Description &d, bool dense,
                        const Decision &decision, const Decision *cached,
                        const nb::object &intervals) {
    const Torch &t = torch();
    const nb::object source =
        dense ? nb::borrow(tensor) : t.detach.call(tensor.ptr()).attr("contiguous")();
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
