#include "actnn/saving/native/step.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

namespace nb = nanobind;

namespace actnn {
namespace {

constexpr size_t kMostOperands = 8;  // tensors that one operation saves

// Words that Python knows, made once.
struct Words {
    nb::object empty = nb::str(""), subclass = nb::str("tensor subclass"), small = nb::str("small"),
               attribute = nb::str("attribute of its module"), kept = nb::str("kept"),
               compressed = nb::str("compressed"), compared = nb::str("compared in backward"),
               again = nb::str("made again in backward"),
               divided = nb::str("divided by in backward"), custom = nb::str("saved by a Function"),
               leaf = nb::str("leaf"), of_parameter = nb::str("view of a parameter"),
               of_buffer = nb::str("view of a buffer"), of_leaf = nb::str("view of a leaf"),
               not_floating = nb::str("not floating point"),
               without_gradient = nb::str("without gradient");
};
const Words &words() {
    static const Words *const found = new Words;
    return *found;
}

// Whether an object that a weak reference stands for is alive; returns it, or None.
nb::object dereferenced(const nb::object &reference) {
    return reference.is_valid() ? checked(PyObject_CallNoArgs(reference.ptr())) : nb::none();
}

nb::object weak(const nb::handle &object) {
    return checked(PyWeakref_NewRef(object.ptr(), nullptr));
}

// Whether a module holds a tensor, or that of which it is a view, as a plain attribute: pruning,
// for one, makes a weight before each forward and leaves it in the module.
bool is_attribute(const nb::handle &whole, const nb::object &module) {
    if (module.is_none()) return false;
    const PyObject *const wanted = whole.ptr();
    const nb::object attributes = checked(PyObject_GenericGetDict(module.ptr(), nullptr));
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(attributes.ptr(), &position, &key, &value))
        if (value == wanted) return true;
    return false;
}

// The reason for views of what is kept for a reason.
nb::object view_of_a(const nb::object &known) {
    if (known.is(parameter_reason())) return words().of_parameter;
    if (known.is(buffer_reason())) return words().of_buffer;
    return nb::str("view of a ") + known;
}

// A view of elements that are held once; whole: the dense tensor that is held.
nb::object view_of(const nb::object &held, const nb::handle &tensor, const nb::object &whole) {
    const Torch &t = torch();
    const int64_t start =
        number(t.storage_offset.call(tensor.ptr())) - number(t.storage_offset.call(whole.ptr()));
    const nb::object layout =
        nb::make_tuple(t.shape.of(tensor.ptr()), t.stride.call(tensor.ptr()), start);
    return nb::cast(new View(held, layout), nb::rv_policy::take_ownership);
}

// Whether what is held is the tensor of a description itself.
bool is_kept_as(const nb::object &held, const Description &d) {
    const auto *const kept = as<Kept>(held);
    Description k;
    return kept && torch().tensors.describe(kept->tensor().ptr(), k) && k.address == d.address &&
           std::equal(k.shape, k.shape + k.dimensions, d.shape, d.shape + d.dimensions) &&
           std::equal(k.strides, k.strides + k.dimensions, d.strides, d.strides + d.dimensions);
}

// Whether memory has other numbers than the elements of a tensor.
bool is_negated(const nb::handle &tensor, const Description &d) {
    return holds_true(torch().is_neg.call(tensor.ptr())) ||
           (!d.is_floating && holds_true(torch().is_conj.call(tensor.ptr())));
}

// Whether what is held for a tensor of some memory does for another one. is_sure: whether the
// memory is still that which the first one had.
bool does_for(const nb::object &held, const Look &look, bool is_sure) {
    if (is_negated(look.tensor, look.d)) return false;
    const auto *const kept = as<Kept>(held);
    if (!kept) return true;
    Description d;
    return torch().tensors.describe(kept->tensor().ptr(), d) &&
           (is_sure || d.address == look.d.address) && !is_negated(kept->tensor(), d);
}

}  // namespace

Look::Look(const nb::handle &tensor)
    : tensor(nb::borrow(tensor)),
      is_described(torch().is_plain(tensor.ptr()) && torch().tensors.describe(tensor.ptr(), d)),
      version(torch().tensors.version(tensor.ptr())) {}

const Op *Look::op() const {
    if (!op_) op_ = requires_grad() ? op_of(tensor) : nullptr;
    return *op_;
}

nb::object Look::kept(int64_t held, const std::shared_ptr<Counter> &counter) const {
    const bool is_leaf = op_ ? !*op_ : holds_true(torch().is_leaf.of(tensor.ptr()));
    return Kept::make(tensor, is_leaf, version, held, counter);
}

bool Look::requires_grad() const {
    if (!requires_grad_) requires_grad_ = holds_true(torch().requires_grad.of(tensor.ptr()));
    return *requires_grad_;
}

const nb::object &Look::storage() const {
    if (!storage_.is_valid()) storage_ = torch().storage.call(tensor.ptr());
    return storage_;
}

const nb::object &Look::base() const {
    if (!base_.is_valid()) base_ = torch().base.of(tensor.ptr());
    return base_;
}

Step::Storage &Step::storage_of(const nb::handle &tensor) {
    const nb::object storage = torch().storage.call(tensor.ptr());
    Storage &found = fresh(torch().address_of(storage));
    if (!found.reference) found.reference = WeakStorage(storage);
    return found;
}

Step::Storage &Step::fresh(uintptr_t address) {
    Storage &found = storages_[address];
    const auto lives = [](const Saved &each) { return !dereferenced(each.held).is_none(); };
    if ((found.exact.is_valid() || !found.saved.empty()) && !found.reference &&
        std::none_of(found.saved.begin(), found.saved.end(), lives))
        found = Storage();  // another storage had the address
    return found;
}

Step::Saved Step::key_of(const Look &look, bool dense) const {
    const Description &d = look.d;
    Saved key{d.address, d.elements(), {}, d.kind, look.version, {}, 0, {}, 0};
    if (!dense) {
        key.layout.assign(d.shape, d.shape + d.dimensions);
        key.layout.insert(key.layout.end(), d.strides, d.strides + d.dimensions);
    }
    return key;
}

void Step::add_known(const nb::handle &tensor, nb::object reason) {
    Description d;
    if (torch().is_plain(tensor.ptr()) && torch().tensors.describe(tensor.ptr(), d))
        storage_of(tensor).known = std::move(reason);
}

void Step::keep_exact(const nb::handle &tensor, nb::object reason) {
    storage_of(tensor).exact = std::move(reason);
}

void Step::keep_compared(const nb::handle &tensor) { storage_of(tensor).compared = true; }

void Step::claim(const nb::handle &codes, nb::object reason, nb::object instead_of,
                 nb::object choice) {
    storage_of(codes).claim = Claim{std::move(reason), std::move(instead_of),
                                    std::move(choice), words().empty,
                                    nb::none(),        nb::none()};
}

void Step::promise(const nb::handle &tensor, nb::object instead_of, nb::object op,
                   nb::object choice, const nb::object &made, nb::object scale) {
    storage_of(tensor).normalized = Claim{nb::str("normalized input"),
                                          std::move(instead_of),
                                          std::move(choice),
                                          std::move(op),
                                          made,
                                          std::move(scale)};
}

void Step::note(nb::object reason, nb::object instead_of, nb::object choice) {
    record_instead(Claim{std::move(reason), std::move(instead_of), std::move(choice), words().empty,
                         nb::none(), nb::none()},
                   0);
}

nb::object Step::keep_operand(const nb::handle &tensor, int64_t nbytes) {
    return Look(tensor).kept(nbytes, counter_);
}

nb::list Step::operands() const {
    nb::list found;
    for (const Operand &each : operands_)
        found.append(nb::make_tuple(each.packed, each.tensor, each.version, each.record));
    return found;
}

void Step::forget() {
    std::unordered_map<uintptr_t, Storage> storages;
    std::deque<Operand> operands;
    std::swap(storages, storages_);
    std::swap(operands, operands_);
    states_.clear();
}

void Step::remember(const Look &look, const nb::object &packed, size_t record) {
    if (is_first_) self().attr("_remember")(look.tensor, packed, record);
    if (as<Kept>(packed)) return;
    if (operands_.size() == kMostOperands) operands_.pop_front();
    operands_.push_back({weak(packed), weak(look.tensor), look.version, record});
}

nb::object Step::pack(const nb::handle &tensor) {
    const Look look(tensor);
    if (const Owned *const known = model_.of(tensor.ptr()))
        return keep(look, known->reason, 0, {}, known->owner);
    if (!look.is_described) return keep(look, words().subclass, 0);
    const Torch &t = torch();
    const uintptr_t address = t.address_of(look.storage());
    // What is alive anyway is not shared.
    const auto keep_known = [&](const nb::object &reason, nb::object owner, const Look &known) {
        return keep(known, look.base().is_none() ? reason : view_of_a(reason), 0, {},
                    std::move(owner));
    };
    if (const Owned *const known = model_.of_storage(address))
        return keep_known(known->reason, known->owner, look);
    Storage &storage = fresh(address);
    const bool is_new = !storage.reference && storage.saved.empty();
    // An operator sees the input, so that the host's meter counts it.
    if (storage.known.is_valid())
        return keep_known(storage.known, {}, Look(t.detach.call(tensor.ptr())));

    if (!storage.exact.is_valid() && !storage.claim &&
        in_custom_function(reinterpret_cast<PyObject *>(PyEval_GetFrame())))
        storage.exact = words().custom;
    bool dense = look.d.is_dense();
    std::optional<Look> around;
    if (!dense && !is_negated(tensor, look.d)) {
        const nb::object found = self().attr("_whole")(tensor);
        if (!found.is_none()) around.emplace(found);
        dense = around && around->is_described;
        if (!dense) around.reset();
    }
    const Look &whole = around ? *around : look;
    Saved key = key_of(whole, dense);
    const auto find = [&]() -> Saved * {
        for (Saved &each : storage.saved)
            if (each.is(key)) return &each;
        return nullptr;
    };
    Saved *const seen = find();
    nb::object operand = seen ? dereferenced(seen->held) : nb::none();
    const bool alive = !operand.is_none();
    const int64_t unrecorded = seen ? seen->nbytes : 0;
    if (alive && !(storage.exact.is_valid() && as<Compressed>(operand)) &&
        does_for(operand, whole, bool(storage.reference))) {
        const Where where = paths_.current();
        const size_t shared = seen->record;
        const nb::object scale = seen->scale;
        if (!where.boundary || holds_true(self().attr("_may_share")(shared, tensor, where.path))) {
            seen->nbytes = 0;
            record(look, unrecorded, 0, nb::str("shared with ") + nb::str(nb::int_(shared)), {},
                   where.path);
            nb::object held = operand;
            if (auto *const codes = as<Compressed>(operand)) codes->share();
            if (!scale.is_none()) held = self().attr("_scaled")(operand, scale);
            if (adaptive_) self().attr("_share")(shared, where.path);
            const nb::object packed =
                dense && !is_kept_as(held, look.d) ? view_of(held, tensor, whole.tensor) : held;
            remember(look, packed, records_.size() - 1);
            return packed;
        }
    }
    if (storage.claim) {
        const Claim claim = *std::move(storage.claim);
        storage.claim.reset();
        const nb::object kept = look.kept(look.nbytes(), counter_);
        record_instead(claim, look.nbytes());
        return kept;
    }
    if (storage.replaced) {  // torch would have held this storage for both
        records_[*storage.replaced].nbytes = 0;
        storage.replaced.reset();
    }
    const size_t index = records_.size();
    std::optional<Claim> instead;
    std::swap(instead, storage.normalized);
    const Op *const op = look.op();
    if (!seen && op && op->looks_back) {
        nb::object again = self().attr("_look_back")(tensor, is_new);
        if (!again.is_none()) {
            record_instead(Claim{words().again, nb::borrow(tensor), keep_choice(), op->name,
                                 nb::none(), nb::none()},
                           0);
            return again;
        }
    }
    const nb::object held = hold(whole, dense, look, storage, instead);
    // While a tensor is kept, no other storage has the address of its own.
    if (!storage.reference && !as<Kept>(held)) storage.reference = WeakStorage(look.storage());
    if (alive) records_[index].nbytes = unrecorded;  // torch would have held it once
    Saved *before = find();                          // what ran since may have added others
    if (!before) {
        storage.saved.push_back(std::move(key));
        before = &storage.saved.back();
    }
    before->held = weak(held);
    if (as<Kept>(held)) last_kept_ = before->held;
    before->record = index;
    before->scale = nb::none();
    before->nbytes = 0;
    if (instead && !instead->made.is_none()) {
        const Look as_made(instead->made);
        Saved made = key_of(as_made, true);
        made.held = weak(held);
        made.record = index;
        made.scale = instead->scale;
        made.nbytes = look.nbytes();
        storage_of(instead->made).saved.push_back(std::move(made));
    }
    // Bits per sample need one row for each sample, so that the codes may have another shape.
    const bool other = around || (dense && by_sample_);
    const nb::object packed = other ? view_of(held, tensor, whole.tensor) : held;
    remember(look, packed, index);
    return packed;
}

nb::object Step::why_kept(const Look &look, bool &alive) {
    const nb::object &tensor = look.tensor, &base = look.around();
    const bool is_view = !base.is(tensor);
    const Op *const op = is_view ? op_of(base) : look.op();
    alive =
        !op && (is_view ? holds_true(torch().requires_grad.of(base.ptr())) : look.requires_grad());
    if (alive) {
        const bool parameter = PyObject_IsInstance(base.ptr(), torch().parameter.ptr()) == 1;
        if (is_view) return parameter ? words().of_parameter : words().of_leaf;
        return parameter ? parameter_reason() : words().leaf;
    }
    if (!look.d.is_floating) return words().not_floating;
    if (!look.requires_grad()) return words().without_gradient;
    if (op && (op->is_form || marked_computed)) return self().attr("_weight_reason")(base);
    return nb::none();
}

nb::object Step::hold(const Look &whole, bool dense, const Look &part, Storage &storage,
                      const std::optional<Claim> &instead) {
    const int64_t nbytes = whole.nbytes();
    nb::object reason = nb::none();
    bool alive = false;
    if (!instead) {
        reason = why_kept(whole, alive);
        if (reason.is(words().without_gradient) && !opaque_.is_none() &&
            nb::cast<bool>(opaque_.attr("is_activation")(whole.tensor)))
            reason = nb::none();
    }
    if (reason.is_none() && storage.compared) reason = words().compared;
    if (!reason.is_none()) return keep(whole, reason, alive ? 0 : nbytes);
    if (nbytes < min_bytes_) return keep(whole, words().small, nbytes);
    if (is_negated(whole.tensor, whole.d)) return keep(whole, words().subclass, nbytes);
    const Where where = paths_.current();
    if (is_attribute(whole.around(), where.module)) return keep(whole, words().attribute, 0);
    nb::object exact = storage.exact.is_valid() ? storage.exact : nb::none();
    const nb::object other_op = instead ? instead->op : nb::none();
    const Decision *cached = nullptr;
    std::shared_ptr<Use> use;
    if (!instead && (learns_ || uses_.any())) {
        use = uses_.of({nb::cast<std::string>(where.path), whole.op(), part.op(), whole.d.kind},
                       where.path);
        if (use->divides && exact.is_none()) exact = words().divided;
        if (use->compared && exact.is_none()) exact = words().compared;
    }
    Decision decision = decide(whole, part, where, exact, other_op, cached);
    const nb::object op = instead          ? instead->op
                          : where.boundary ? nb::object(nb::str("checkpoint"))
                          : whole.op()     ? whole.op()->name
                                           : words().empty;
    if (decision.action == Decision::keep)
        return keep(whole, decision.reason, nbytes, decision.choice, where.path, op, use);
    if (decision.action == Decision::adapt) {
        const nb::object own =
            self().attr("_adapt")(whole.tensor, where.path, where.module, instead.has_value());
        decision.bits = nb::cast<int64_t>(own[0]);
        decision.choice = own[1];
        decision.action = Decision::encode;
    }
    nb::object held, why = words().compressed, choice = decision.choice;
    if (decision.action == Decision::encode) {
        held = encode(whole, dense, decision, cached, use ? use->intervals : nb::object());
    } else {
        const nb::object found =
            self().attr("_hold")(whole.tensor, part.tensor, where.path, op, where.boundary, exact,
                                 where.module, instead.has_value());
        held = found[0];
        why = found[1];
        choice = found[2];
        if (held.is_none()) return keep(whole, why, nbytes, choice, where.path, op);
    }
    Compressed *const codes = as<Compressed>(held);
    if (codes && use && learns_) codes->watch(use, nb::cast<int64_t>(choice.attr("bits")));
    const int64_t bytes = codes ? codes->held() : nb::cast<int64_t>(held.attr("held"));
    if (instead) {
        Claim claim = *instead;
        claim.choice = choice;
        record_instead(claim, bytes);
    } else {
        record(whole, nbytes, bytes, why, choice, where.path, op);
    }
    return held;
}

nb::object Step::keep(const Look &look, nb::object reason, int64_t nbytes, nb::object choice,
                      nb::object path, nb::object op, std::shared_ptr<Use> use) {
    nb::object copy;
    if (0 < nbytes) {
        const int64_t whole = number(torch().nbytes.call(look.storage().ptr()));
        if (is_held(torch().address_of(look.storage()), whole)) {
            nbytes = 0;
        } else if (nbytes < min_bytes_ && whole > 2 * nbytes &&
                   !is_negated(look.tensor, look.d)) {  // the rest of the storage may go
            copy = torch().clone(torch().detach.call(look.tensor.ptr()));
            storage_of(look.tensor);  // what is kept does not hold it
        }
        nbytes = std::min(nbytes, whole);  // elements of an expanded tensor share memory
    }
    record(look, nbytes, nbytes, std::move(reason), std::move(choice), std::move(path),
           std::move(op));
    nb::object operand = copy.is_valid() ? keep_operand(copy, nbytes) : look.kept(nbytes, counter_);
    if (learns_) as<Kept>(operand)->watch(use ? std::move(use) : uses_.other());
    return operand;
}

bool Step::is_held(uintptr_t address, int64_t nbytes) const {
    const auto place = storages_.find(address);
    if (place == storages_.end()) return false;
    const std::vector<Saved> &saved = place->second.saved;
    return std::any_of(saved.begin(), saved.end(), [&](const Saved &each) {
        const nb::object held = dereferenced(each.held);
        const auto *const kept = as<Kept>(held);
        return kept && kept->held() == nbytes;
    });
}

nb::object Step::last_kept() const { return dereferenced(last_kept_); }

void Step::record_instead(const Claim &claim, int64_t held) {
    const Look look(claim.instead_of);
    Storage &storage = storage_of(claim.instead_of);
    const int64_t nbytes = storage.replaced ? 0 : look.nbytes();
    record(look, nbytes, held, claim.reason, claim.choice);
    if (nbytes) storage.replaced = records_.size() - 1;
}

void Step::record(const Look &look, int64_t nbytes, int64_t held, nb::object reason,
                  nb::object choice, nb::object path, nb::object op) {
    if (!path.is_valid()) path = paths_.current().path;
    if (!choice.is_valid()) choice = keep_choice();
    if (!op.is_valid()) op = words().empty;
    const Description &d = look.d;
    Decisions::Form fresh, *form = &fresh;
    if (look.is_described && d.kind) {
        form_.assign(1, d.kind);
        form_.insert(form_.end(), d.shape, d.shape + d.dimensions);
        form = &decisions_.forms.at(records_.size(), form_);
    }
    if (!form->shape.is_valid())
        *form = {torch().shape.of(look.tensor.ptr()), torch().dtype.of(look.tensor.ptr())};
    records_.add({std::move(path), form->shape, form->dtype, std::move(reason), std::move(choice),
                  std::move(op), nbytes, held});
}

bool Step::marked_computed = false;

}  // namespace actnn
