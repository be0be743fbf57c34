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
               without_gradient = nb::str("without gradient"), dict = nb::str("__dict__");
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
bool is_attribute(const nb::handle &tensor, const nb::object &module) {
    if (module.is_none()) return false;
    const nb::object base = torch().base.of(tensor.ptr());
    const PyObject *const wanted = base.is_none() ? tensor.ptr() : base.ptr();
    const nb::object attributes = checked(PyObject_GetAttr(module.ptr(), words().dict.ptr()));
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

}  // namespace

Step::Storage &Step::storage_of(const nb::handle &tensor) {
    const nb::object storage = torch().storage.call(tensor.ptr());
    const auto [place, is_new] = storages_.try_emplace(torch().address_of(storage));
    if (is_new) place->second.reference = WeakStorage(storage);
    return place->second;
}

Step::Saved Step::key_of(const nb::handle &tensor, const Description &d, bool dense) const {
    Saved key{number(torch().storage_offset.call(tensor.ptr())),
              {},
              d.kind,
              torch().tensors.version(tensor.ptr()),
              {},
              0,
              {},
              0};
    if (dense) {
        key.layout = {d.elements()};
    } else {
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
    return nb::cast(new Kept(tensor, nbytes, counter_), nb::rv_policy::take_ownership);
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

void Step::remember(const nb::handle &tensor, const nb::object &packed, size_t record) {
    if (is_first_) self().attr("_remember")(tensor, packed, record);
    if (as<Kept>(packed)) return;
    if (operands_.size() == kMostOperands) operands_.pop_front();
    operands_.push_back(
        {weak(packed), weak(tensor), torch().tensors.version(tensor.ptr()), record});
}

nb::object Step::pack(const nb::handle &tensor) {
    if (const Owned *const known = model_.of(tensor.ptr()))
        return keep(tensor, known->reason, 0, {}, known->owner);
    const Torch &t = torch();
    Description d;
    if (!t.is_plain(tensor.ptr()) || !t.tensors.describe(tensor.ptr(), d) ||
        holds_true(t.is_neg.call(tensor.ptr())) ||
        (!d.is_floating && holds_true(t.is_conj.call(tensor.ptr()))))
        return keep(tensor, words().subclass, 0);
    const nb::object storage_object = t.storage.call(tensor.ptr());
    const uintptr_t address = t.address_of(storage_object);
    // What is alive anyway is not shared.
    const auto keep_known = [&](const nb::object &reason, nb::object owner,
                                const nb::handle &known) {
        const bool is_view = !t.base.of(tensor.ptr()).is_none();
        return keep(known, is_view ? view_of_a(reason) : reason, 0, {}, std::move(owner));
    };
    if (const Owned *const known = model_.of_storage(address))
        return keep_known(known->reason, known->owner, tensor);
    const auto [place, is_new] = storages_.try_emplace(address);
    Storage &storage = place->second;
    if (is_new) storage.reference = WeakStorage(storage_object);
    // An operator sees the input, so that the host's meter counts it.
    if (storage.known.is_valid()) return keep_known(storage.known, {}, t.detach.call(tensor.ptr()));

    if (!storage.exact.is_valid() && !storage.claim &&
        in_custom_function(reinterpret_cast<PyObject *>(PyEval_GetFrame())))
        storage.exact = words().custom;
    bool dense = d.is_dense();
    nb::object whole = nb::borrow(tensor);
    Description whole_d;
    const Description *held_d = &d;
    if (!dense) {
        const nb::object found = self().attr("_whole")(tensor);
        if (!found.is_none() && t.tensors.describe(found.ptr(), whole_d)) {
            dense = true;
            whole = found;
            held_d = &whole_d;
        }
    }
    Saved key = key_of(whole, *held_d, dense);
    const auto find = [&]() -> Saved * {
        for (Saved &each : storage.saved)
            if (each.is(key)) return &each;
        return nullptr;
    };
    Saved *const seen = find();
    nb::object operand = seen ? dereferenced(seen->held) : nb::none();
    const bool alive = !operand.is_none();
    const int64_t unrecorded = seen ? seen->nbytes : 0;
    if (alive && !(storage.exact.is_valid() && as<Compressed>(operand))) {
        const Where where = paths_.current();
        const size_t shared = seen->record;
        const nb::object scale = seen->scale;
        if (!where.boundary || holds_true(self().attr("_may_share")(shared, tensor, where.path))) {
            seen->nbytes = 0;
            record(tensor, unrecorded, 0, nb::str("shared with ") + nb::str(nb::int_(shared)), {},
                   where.path);
            nb::object held = operand;
            if (auto *const codes = as<Compressed>(operand)) codes->share();
            if (!scale.is_none()) held = self().attr("_scaled")(operand, scale);
            if (adaptive_) self().attr("_share")(shared, where.path);
            const nb::object packed =
                dense && !is_kept_as(held, d) ? view_of(held, tensor, whole) : held;
            remember(tensor, packed, records_.size() - 1);
            return packed;
        }
    }
    if (storage.claim) {
        const Claim claim = *std::move(storage.claim);
        storage.claim.reset();
        const int64_t nbytes = d.elements() * d.bytes;
        const nb::object kept = keep_operand(tensor, nbytes);
        record_instead(claim, nbytes);
        return kept;
    }
    if (storage.replaced) {  // torch would have held this storage for both
        records_[*storage.replaced].nbytes = 0;
        storage.replaced.reset();
    }
    const size_t index = records_.size();
    std::optional<Claim> instead;
    std::swap(instead, storage.normalized);
    const Op *const op = op_of(tensor);
    if (!seen && op && op->looks_back) {
        nb::object again = self().attr("_look_back")(tensor, is_new);
        if (!again.is_none()) {
            record_instead(Claim{words().again, nb::borrow(tensor), keep_choice(), op->name,
                                 nb::none(), nb::none()},
                           0);
            return again;
        }
    }
    const nb::object held = hold(whole, *held_d, dense, tensor, d, op, storage, instead);
    if (alive) records_[index].nbytes = unrecorded;  // torch would have held it once
    Saved *before = find();                          // what ran since may have added others
    if (!before) {
        storage.saved.push_back(key);
        before = &storage.saved.back();
    }
    before->held = weak(held);
    if (as<Kept>(held)) last_kept_ = before->held;
    before->record = index;
    before->scale = nb::none();
    before->nbytes = 0;
    if (instead && !instead->made.is_none()) {
        Description made_d;
        t.tensors.describe(instead->made.ptr(), made_d);
        Storage &of_made = storage_of(instead->made);
        Saved made = key_of(instead->made, made_d, true);
        made.held = weak(held);
        made.record = index;
        made.scale = instead->scale;
        made.nbytes = d.elements() * d.bytes;
        of_made.saved.push_back(std::move(made));
    }
    // Bits per sample need one row for each sample, so that the codes may have another shape.
    const bool other = !whole.is(tensor) || (dense && by_sample_);
    const nb::object packed = other ? view_of(held, tensor, whole) : held;
    remember(tensor, packed, index);
    return packed;
}

nb::object Step::why_kept(const nb::handle &tensor, const Description &d, bool &alive) {
    const Torch &t = torch();
    const nb::object own_base = t.base.of(tensor.ptr());
    const bool is_view = !own_base.is_none();
    const nb::object base = is_view ? own_base : nb::borrow(tensor);
    alive = false;
    if (holds_true(t.requires_grad.of(base.ptr())) && holds_true(t.is_leaf.of(base.ptr()))) {
        alive = true;
        const bool parameter = PyObject_IsInstance(base.ptr(), t.parameter.ptr()) == 1;
        if (is_view) return parameter ? words().of_parameter : words().of_leaf;
        return parameter ? parameter_reason() : words().leaf;
    }
    if (!d.is_floating) return words().not_floating;
    if (!holds_true(t.requires_grad.of(tensor.ptr()))) return words().without_gradient;
    const Op *const op = op_of(base);
    if (op && (op->is_form || marked_computed)) return self().attr("_weight_reason")(base);
    return nb::none();
}

nb::object Step::hold(const nb::handle &whole, const Description &d, bool dense,
                      const nb::handle &part, const Description &part_d, const Op *part_by,
                      Storage &storage, const std::optional<Claim> &instead) {
    const int64_t nbytes = d.elements() * d.bytes;
    nb::object reason = nb::none();
    bool alive = false;
    if (!instead) {
        reason = why_kept(whole, d, alive);
        if (reason.is(words().without_gradient) && !opaque_.is_none() &&
            nb::cast<bool>(opaque_.attr("is_activation")(whole)))
            reason = nb::none();
    }
    if (reason.is_none() && storage.compared) reason = words().compared;
    if (!reason.is_none()) return keep(whole, reason, alive ? 0 : nbytes);
    if (nbytes < min_bytes_) return keep(whole, words().small, nbytes);
    const Where where = paths_.current();
    if (is_attribute(whole, where.module)) return keep(whole, words().attribute, 0);
    nb::object exact = storage.exact.is_valid() ? storage.exact : nb::none();
    const nb::object other_op = instead ? instead->op : nb::none();
    const Decision *cached = nullptr;
    const Op *const made_by = whole.is(part) ? part_by : op_of(whole);
    std::shared_ptr<Use> use;
    if (!instead && (learns_ || uses_.any())) {
        use = uses_.of({nb::cast<std::string>(where.path), made_by, part_by, d.kind}, where.path);
        if (use->divides && exact.is_none()) exact = words().divided;
        if (use->compared && exact.is_none()) exact = words().compared;
    }
    Decision decision =
        decide(whole, d, made_by, part, part_d, part_by, where, exact, other_op, cached);
    const nb::object op = instead          ? instead->op
                          : where.boundary ? nb::object(nb::str("checkpoint"))
                          : made_by        ? made_by->name
                                           : words().empty;
    if (decision.action == Decision::keep)
        return keep(whole, decision.reason, nbytes, decision.choice, where.path, op, use);
    if (decision.action == Decision::adapt) {
        const nb::object own =
            self().attr("_adapt")(whole, where.path, where.module, instead.has_value());
        decision.bits = nb::cast<int64_t>(own[0]);
        decision.choice = own[1];
        decision.action = Decision::encode;
    }
    nb::object held, why = words().compressed, choice = decision.choice;
    if (decision.action == Decision::encode) {
        held = encode(whole, d, dense, decision, cached, use ? use->intervals : nb::object());
    } else {
        const nb::object found = self().attr("_hold")(whole, part, where.path, op, where.boundary,
                                                      exact, where.module, instead.has_value());
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

nb::object Step::keep(const nb::handle &tensor, nb::object reason, int64_t nbytes,
                      nb::object choice, nb::object path, nb::object op, std::shared_ptr<Use> use) {
    nb::object kept = nb::borrow(tensor);
    if (0 < nbytes) {
        const nb::object storage = torch().storage.call(tensor.ptr());
        const int64_t whole = number(torch().nbytes.call(storage.ptr()));
        if (is_held(torch().address_of(storage), whole))
            nbytes = 0;
        else if (nbytes < min_bytes_ && whole > 2 * nbytes)  // the rest of the storage may go
            kept = torch().clone(torch().detach.call(tensor.ptr()));
        nbytes = std::min(nbytes, whole);  // elements of an expanded tensor share memory
    }
    record(tensor, nbytes, nbytes, std::move(reason), std::move(choice), std::move(path),
           std::move(op));
    nb::object operand = keep_operand(kept, nbytes);
    if (learns_) nb::inst_ptr<Kept>(operand)->watch(use ? std::move(use) : uses_.other());
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
    const nb::object &tensor = claim.instead_of;
    Storage &storage = storage_of(tensor);
    Description d;
    torch().tensors.describe(tensor.ptr(), d);
    const int64_t nbytes = storage.replaced ? 0 : d.elements() * d.bytes;
    record(tensor, nbytes, held, claim.reason, claim.choice);
    if (nbytes) storage.replaced = records_.size() - 1;
}

void Step::record(const nb::handle &tensor, int64_t nbytes, int64_t held, nb::object reason,
                  nb::object choice, nb::object path, nb::object op) {
    if (!path.is_valid()) path = paths_.current().path;
    if (!choice.is_valid()) choice = keep_choice();
    if (!op.is_valid()) op = words().empty;
    auto [shape, dtype] = decisions_.form_of(tensor);
    records_.add({std::move(path), std::move(shape), std::move(dtype), std::move(reason),
                  std::move(choice), std::move(op), nbytes, held});
}

bool Step::marked_computed = false;

}  // namespace actnn
