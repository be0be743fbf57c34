#include "actnn/saving/native/held.hpp"

#include <structmember.h>

#include <cstddef>
#include <new>
#include <unordered_map>

namespace nb = nanobind;

namespace actnn {
namespace {

constexpr int64_t kKept = 8;  // bits that are assumed of codes beside what is kept

// Whether autograd's engine asks, and not code of Python that runs in a backward.
bool engine_asks() {
    static const nb::object *const enter = new nb::object(
        nb::module_::import_("torch.autograd.graph").attr("_engine_run_backward").attr("__code__"));
    PyFrameObject *const frame = PyEval_GetFrame();
    if (!frame) return true;  // a thread of the engine
    return nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame))).is(*enter);
}

// The node whose backward runs, if that is one of a norm; else null.
nb::object running_norm() {
    static auto *const known = new std::unordered_map<PyObject *, bool>;
    nb::object node = call(torch().current_node);
    if (node.is_none()) return {};
    const nb::object type = nb::borrow(reinterpret_cast<PyObject *>(Py_TYPE(node.ptr())));
    auto found = known->find(type.ptr());
    if (found == known->end()) {
        const nb::object norms = held_rules().norms;
        type.inc_ref();  // known for good
        found = known
                    ->emplace(type.ptr(),
                              nb::cast<bool>(norms.attr("__contains__")(node.attr("name")())))
                    .first;
    }
    return found->second ? node : nb::object();
}

nb::object item(const nb::handle &layout, int i) {
    return nb::borrow(PyTuple_GetItem(layout.ptr(), i));
}

struct KeptHead {
    PyObject_HEAD;
    PyObject *references;  // weak ones
};
struct KeptObject : KeptHead {
    Kept kept;
};

void free_kept(PyObject *self) {
    PyTypeObject *const type = Py_TYPE(self);
    auto *const object = reinterpret_cast<KeptObject *>(self);
    if (object->references) PyObject_ClearWeakRefs(self);
    object->kept.~Kept();
    PyObject_Free(self);
    Py_DECREF(type);
}

}  // namespace

HeldRules &held_rules() {
    static HeldRules *const found = new HeldRules;
    return *found;
}

void Use::compares(const nb::handle &with) {
    if (!any) return;
    if (!PyDict_Size(with.ptr())) {
        compared = *any = true;
        return;
    }
    if (!intervals.is_valid()) intervals = checked(PyDict_New());
    if (PyDict_Update(intervals.ptr(), with.ptr())) throw nb::python_error();
    *any = true;
}

bool Use::ask(const nb::handle &tensor, int64_t bits, const nb::handle &named) {
    const nb::object answer = held_rules().divides(tensor, bits, named);
    if (PyDict_Check(answer.ptr())) {
        compares(answer);
        return true;
    }
    const bool found = holds_true(answer);
    if (found && any) divides = *any = true;
    return found;
}

const nb::object &Kept::type() {
    static PyMemberDef members[] = {
        {"__weaklistoffset__", T_PYSSIZET, offsetof(KeptHead, references), READONLY, nullptr}, {}};
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void *>(free_kept)}, {Py_tp_members, members}, {}};
    static PyType_Spec spec = {"actnn.saving._native.Kept", sizeof(KeptObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
    static const nb::object *const found = new nb::object(checked(PyType_FromSpec(&spec)));
    return *found;
}

// Like autograd, holds a leaf itself. Others are detached: an output that held itself through its
// own autograd node would never be freed.
nb::object Kept::make(const nb::handle &tensor, bool is_leaf, int64_t version, int64_t held,
                      std::shared_ptr<Counter> counter) {
    nb::object own = is_leaf ? nb::borrow(tensor) : torch().detach.call(tensor.ptr());
    auto *const type = reinterpret_cast<PyTypeObject *>(Kept::type().ptr());
    KeptObject *const object = PyObject_New(KeptObject, type);
    if (!object) throw nb::python_error();
    object->references = nullptr;
    new (&object->kept) Kept(std::move(own), version, held, std::move(counter));
    return nb::steal(reinterpret_cast<PyObject *>(object));
}

template <>
Kept *as<Kept>(const nb::handle &o) {
    if (o.type().ptr() != Kept::type().ptr()) return nullptr;
    return &reinterpret_cast<KeptObject *>(o.ptr())->kept;
}

nb::object Kept::unpack(const nb::handle &view) const {
    if (torch().tensors.version(tensor_.ptr()) != version_)
        held_rules().refuse_changed(tensor_, version_);
    if (instead_.is_valid()) return instead_();
    if (use_) use_->ask(tensor_, kKept, nb::none());
    if (view.is_none()) return tensor_;
    const int64_t start =
        number(item(view, 2)) + number(torch().storage_offset.call(tensor_.ptr()));
    return torch().as_strided(tensor_, item(view, 0), item(view, 1), start);
}

Beside::Beside(const nb::handle &tensor, std::shared_ptr<Counter> counter)
    : tensor_(torch().detach.call(tensor.ptr())),
      version_(torch().tensors.version(tensor.ptr())),
      share_(std::move(counter), nb::cast<int64_t>(tensor.attr("nbytes"))) {}

nb::object Beside::get() const {
    const bool same = torch().tensors.version(tensor_.ptr()) == version_;
    return same ? tensor_ : nb::object();
}

void Compressed::keep(nb::object other) {
    // What is freed may run other code: last.
    Encoded before;
    before.codes = nb::none();
    before.sides = nb::none();
    std::swap(before.codes, encoded_.codes);
    std::swap(before.sides, encoded_.sides);
    beside_.reset();
    other_ = std::move(other);
    share_.set(0);  // the other counts
}

nb::object Compressed::unpack(const nb::handle &view, const Beside *exact) {
    if (other_.is_valid()) return actnn::unpack(other_, view);
    if (holds_true(call(torch().is_grad_enabled))) held_rules().refuse_second_derivative();
    const nb::object storage = decoded_.get();
    nb::object tensor;
    if (storage.is_none()) {
        tensor = encoded_.decode(encoded_.codes);
        // The backward of ReLU passes what is above 0, however little; others have other bounds.
        if (!encoded_.sides.is_none()) tensor = held_rules().restore_sides(tensor, encoded_.sides);
        if (is_shared_) decoded_ = WeakStorage(torch().storage.call(tensor.ptr()));
        if (!view.is_none())
            tensor = torch().as_strided(tensor, item(view, 0), item(view, 1), item(view, 2));
    } else {
        const nb::object start = view.is_none() ? nb::int_(0) : item(view, 2);
        tensor = held_rules().view_of_storage(storage, encoded_.dtype, start,
                                              view.is_none() ? encoded_.shape : item(view, 0),
                                              view.is_none() ? encoded_.strides : item(view, 1));
    }
    const nb::object kept = exact ? exact->get() : nb::object();
    const bool silent = kept.is_valid() || (use_ && *use_->warned);
    const bool steep =
        use_ && use_->ask(tensor, bits_, silent ? nb::object(nb::none()) : use_->path);
    if (steep && !silent && use_->divides) *use_->warned = true;
    return steep && kept.is_valid() ? kept : tensor;
}

nb::object Compressed::codes() const {
    if (other_.is_valid()) return other_.attr("codes");
    return nb::make_tuple(encoded_.codes, encoded_.groups, encoded_.shape);
}

nb::object View::codes() const { return held_.attr("codes"); }

void View::keep(nb::object other) {
    held_ = std::move(other);
    layout_ = nb::none();
    beside_.reset();
}

nb::object View::unpack() const {
    if (beside_) return nb::inst_ptr<Compressed>(held_)->unpack(layout_, beside_.get());
    return actnn::unpack(held_, layout_);
}

nb::object unpack(const nb::handle &held, const nb::handle &view) {
    if (const auto *const kept = as<Kept>(held)) return kept->unpack(view);
    if (auto *const codes = as<Compressed>(held)) return codes->unpack(view);
    if (const auto *const part = as<View>(held)) return part->unpack();
    return view.is_none() ? held.attr("unpack")() : held.attr("unpack")(view);
}

nb::object unpack_for_backward(const nb::handle &held) {
    nb::object tensor = unpack(held, nb::none());
    if (as<Kept>(held)) return tensor;
    const nb::object norm = running_norm();
    if (!norm.is_valid() || !engine_asks()) return tensor;
    const auto *const whole = as<Compressed>(held);
    const auto *const part = as<View>(held);
    if ((whole && whole->is_beside(tensor)) || (part && part->is_beside(tensor))) return tensor;
    const nb::object codes = whole ? whole->codes() : held.attr("codes");
    if (codes.is_none()) return tensor;
    return held_rules().limit_normalized(norm, tensor, *nb::tuple(codes));
}

}  // namespace actnn
