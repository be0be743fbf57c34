#include "bindings/cpu_calls.hpp"

#include <cstdlib>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

constexpr size_t kMostMakers = 256;

std::string value_of(const std::string &variable) {
    const char *found = std::getenv(variable.c_str());
    return found ? found : "";
}

// Values (T, N, n) of a view with these dimensions first and second; (rows, n) if they are packed.
RealValues values_of(const View &view, const std::optional<Packing> &packing,
                     bool rows_first = false) {
    RealValues found{reinterpret_cast<void *>(view.address),
                     static_cast<Real>(view.kind),
                     view.strides[rows_first],
                     view.strides[!rows_first],
                     view.shape[2] == 1 ? 1 : view.strides[2],
                     nullptr,
                     nullptr};
    if (packing) found.starts = reinterpret_cast<const int64_t *>(packing->layout) + packing->N;
    return found;
}

// States (cells, N, n), whose rows have the caller's order.
RealValues states_of(const View &view, const std::optional<Packing> &packing) {
    RealValues found = values_of(view, std::nullopt);
    if (packing) found.order = reinterpret_cast<const int64_t *>(packing->sorted);
    return found;
}

}  // namespace

Setting::Setting(const char *variable) : variable_(variable), value_(value_of(variable)) {}

bool Setting::holds() const {
    const char *found = std::getenv(variable_.c_str());
    return found ? value_ == found : value_.empty();
}

std::optional<Float> TensorMakers::kind_of(const nb::object &dtype) const {
    for (int i = 0; i < 4; ++i)
        if (nb::object(dtypes_[static_cast<size_t>(i)]).is(dtype)) return static_cast<Float>(i);
    return std::nullopt;
}

Maker TensorMakers::of(size_t dtype, const std::vector<int64_t> &shape, bool rows_first) {
    std::vector<int64_t> key = shape;
    key.push_back(static_cast<int64_t>(2 * dtype + rows_first));
    const auto found = kept_.find(key);
    if (found != kept_.end()) return found->second;
    nb::list sizes;
    for (int64_t size : shape) sizes.append(size);
    nb::object strides = nb::none();
    if (rows_first) strides = nb::make_tuple(shape[2], shape[0] * shape[2], 1);
    const Maker made(maker_(nb::tuple(sizes), nb::arg("dtype") = nb::object(dtypes_[dtype]),
                            nb::arg("strides") = strides));
    // Replaced as a whole, because other threads may run whenever an object is released.
    decltype(kept_) before;
    if (kept_.size() >= kMostMakers) std::swap(kept_, before);
    kept_[key] = made;
    return made;
}

CPUCalls::CPUCalls(Stack &stack, const char *variable, const nb::tuple &torch,
                   const nb::tuple &dtypes, nb::object maker)
    : stack_(stack),
      setting_(variable),
      tensors_(torch[0], -1),
      get_num_threads_(torch[1]),
      makers_(dtypes, std::move(maker)) {}

nb::object CPUCalls::run(const Call::Given &given, Float results, bool keeps) {
    const int64_t T = given.T(), N = given.N(), H = stack_.layer(0, 0).H();
    const int64_t width = stack_.directions() * H;
    const bool rows_first = given.rows_first;
    const int64_t *const strides = given.x_view.strides;
    // Whether rows are outermost in the memory of the output.
    const bool outer = !given.packing && strides[!rows_first] > strides[rows_first];
    if (tensors_.is_neg(given.x) || (given.h0 && tensors_.is_neg(given.h0)))
        return nb::borrow(Py_NotImplemented);
    Stack::RealCall job;
    job.x = values_of(given.x_view, given.packing, rows_first);
    if (given.h0) job.h0 = states_of(given.h0_view, given.packing);
    const auto kind = static_cast<Real>(results);
    const nb::object y = given.packing ? makers_.real(results, {given.x_view.shape[1], width})()
                         : rows_first  ? makers_.real(results, {N, T, width}, !outer)()
                                       : makers_.real(results, {T, N, width}, outer)();
    const nb::object last = makers_.real(results, {cells(), N, H})();
    auto at = [&](const nb::object &tensor) {
        return reinterpret_cast<void *>(tensors_.address(tensor.ptr()));
    };
    job.y = {at(y),        kind,   (outer ? 1 : N) * width, (outer ? T : 1) * width, 1,
             job.x.starts, nullptr};
    job.last = RealValues::contiguous(at(last), kind, N, H);
    if (given.lengths)
        job.lengths = reinterpret_cast<const int64_t *>(tensors_.address(given.lengths));
    if (given.packing) {
        job.last.order = reinterpret_cast<const int64_t *>(given.packing->unsorted);
        job.lengths = reinterpret_cast<const int64_t *>(given.packing->layout);
    }
    nb::object nan;
    nb::list codes;
    std::vector<void *> kept;
    if (keeps) {
        nan = makers_.real(Float::float32, {cells(), N})();
        job.nan = static_cast<float *>(at(nan));
        for (size_t i = 0; i < stack_.depth(); ++i)
            for (int d = 0; d < stack_.directions(); ++d) {
                const Container container = stack_.layer(i, d).h().container;
                const nb::object made = makers_.codes(container, {T, N, H})();
                kept.push_back(at(made));
                codes.append(made);
            }
        job.kept = kept.data();
    }
    job.T = T;
    job.N = N;
    job.threads = threads();
    if (T && N) {
        nb::gil_scoped_release release;
        stack_.run(job);
    }
    return keeps ? nb::make_tuple(y, last, nan, codes) : nb::make_tuple(y, last);
}

nb::object CPUCalls::run_tensors(const nb::object &x, const nb::object &h0,
                                 const nb::object &lengths, const nb::object &packing,
                                 const nb::object &dtype, bool keeps) {
    auto given = [](const nb::object &o) { return o.is_none() ? nullptr : o.ptr(); };
    Call::Given all{
        x.ptr(), given(h0), given(lengths), {}, {}, false, Packing::of(packing, tensors_)};
    const std::optional<Float> results = makers_.kind_of(dtype);
    const int64_t C = stack_.layer(0, 0).C(), H = stack_.layer(0, 0).H();
    if (!results || !tensors_.view(all.x, all.x_view, all.packing ? 2 : 3) ||
        all.x_view.shape[2] != C || (all.h0 && !tensors_.view(all.h0, all.h0_view)))
        throw nb::value_error("Expected real values on the CPU with the features of the stack");
    const auto &states = all.h0_view.shape;
    if (all.h0 && (states[0] != cells() || states[1] != all.N() || states[2] != H))
        throw nb::value_error("Expected one state for each cell and row");
    return run(all, *results, keeps);
}

nb::object CPUBackward::run(const Given &given) {
    const Stack &stack = calls_.stack();
    const Tensors &tensors = calls_.tensors();
    TensorMakers &makers = calls_.makers();
    const int D = stack.directions();
    const int64_t H = stack.layer(0, 0).H(), C = stack.layer(0, 0).C(), cells = calls_.cells();
    const auto packing = Packing::of(given.packing, tensors);
    const std::optional<Float> results = makers.kind_of(given.dtype);
    if (!calls_.is_chosen() || !results) return nb::none();

    // Fills `to` with a tensor that may be absent; false if it is not supported.
    auto take = [&](const nb::object &tensor, bool are_states, int64_t features, RealValues &to,
                    View &view) {
        if (tensor.is_none()) return true;
        if (!tensors.is_plain(tensor.ptr(), view, packing && !are_states ? 2 : 3) ||
            tensors.is_neg(tensor.ptr()) || !view.address || view.shape[2] != features)
            return false;
        to = are_states ? states_of(view, packing) : values_of(view, packing);
        return true;
    };
    StackBackwardCall job;
    View x{}, h0{}, grad_y{}, grad_last{};
    if (!take(given.x, false, C, job.x, x) || !take(given.h0, true, H, job.h0, h0) ||
        !take(given.grad_y, false, D * H, job.grad_y, grad_y) ||
        !take(given.grad_last, true, H, job.grad_last, grad_last) || !job.x.data)
        return nb::none();
    job.T = packing ? packing->T : x.shape[0];
    job.N = packing ? packing->N : x.shape[1];
    auto are_as_x = [&](const View &view) {
        return !view.address || (view.shape[0] == x.shape[0] && view.shape[1] == x.shape[1]);
    };
    auto are_of_cells = [&](const View &view) {
        return !view.address || (view.shape[0] == cells && view.shape[1] == job.N);
    };
    if (!are_as_x(grad_y) || !are_of_cells(h0) || !are_of_cells(grad_last)) return nb::none();
    if (!job.T || !job.N) return nb::none();

    auto at = [&](PyObject *tensor) { return reinterpret_cast<void *>(tensors.address(tensor)); };
    // Hooks on saved tensors may have given others.
    auto is_as_made = [&](PyObject *tensor, int64_t elements, int64_t bytes) {
        kernel_runtime::Description found;
        return tensors.describe(tensor, found) && found.device < 0 && found.is_contiguous() &&
               found.elements() == elements && found.bytes == bytes;
    };
    std::vector<const void *> out;
    const bool are_made =
        is_as_made(given.nan.ptr(), cells * job.N, 4) &&
        all_hold(given.outs, static_cast<size_t>(cells), [&](PyObject *each, size_t i) {
            const Layer &layer = stack.layer(i / static_cast<size_t>(D),
                                             static_cast<int>(i % static_cast<size_t>(D)));
            out.push_back(at(each));
            return is_as_made(each, job.T * job.N * H, container_bytes(layer.h().container));
        });
    if (!are_made) return nb::none();
    job.out = out.data();
    job.nan = static_cast<const float *>(at(given.nan.ptr()));
    if (packing) job.lengths = reinterpret_cast<const int64_t *>(packing->layout);

    const size_t count = nb::len(given.wanted), each = (count - 2) / static_cast<size_t>(cells);
    nb::list found;
    auto is_wanted = [&](size_t i) { return holds_true(nb::borrow(given.wanted[i])); };
    auto add = [&](const nb::object &made) {
        found.append(made);
        return made.is_none() ? nullptr : at(made.ptr());
    };
    const auto x_kind = static_cast<Real>(x.kind);
    if (!is_wanted(0)) {
        add(nb::none());
    } else if (packing) {
        job.dx = RealValues::contiguous(add(makers.real(x.kind, {x.shape[1], C})()), x_kind, 0, C);
        job.dx.starts = job.x.starts;
    } else {
        job.dx =
            RealValues::contiguous(add(makers.real(x.kind, {job.T, job.N, C})()), x_kind, job.N, C);
    }
    if (!is_wanted(1) || !job.h0.data) {
        add(nb::none());
    } else {
        job.dh0 = RealValues::contiguous(add(makers.real(h0.kind, {cells, job.N, H})()),
                                         static_cast<Real>(h0.kind), job.N, H);
        if (packing) job.dh0.order = reinterpret_cast<const int64_t *>(packing->unsorted);
    }
    const auto kind = static_cast<Real>(*results);
    job.cells.resize(static_cast<size_t>(cells));
    for (size_t cell = 0; cell < job.cells.size(); ++cell) {
        const int64_t inputs = stack.layer(cell / static_cast<size_t>(D), 0).C();
        StackBackwardCall::Gradients &to = job.cells[cell];
        RealValues *const fields[] = {&to.W, &to.R, &to.bw, &to.br};
        for (size_t i = 0; i < each; ++i) {
            const int64_t columns = i == 0 ? inputs : i == 1 ? H : 3 * H;
            const std::vector<int64_t> shape =
                i < 2 ? std::vector<int64_t>{3 * H, columns} : std::vector<int64_t>{3 * H};
            const bool wanted = is_wanted(2 + cell * each + i);
            void *const data = add(wanted ? makers.real(*results, shape)() : nb::none());
            if (data) *fields[i] = RealValues::contiguous(data, kind, i < 2 ? 3 * H : 1, columns);
        }
    }
    job.threads = calls_.threads();
    {
        nb::gil_scoped_release release;
        run_backward(stack, weights_, job);
    }
    return found;
}

}  // namespace quant_gru
