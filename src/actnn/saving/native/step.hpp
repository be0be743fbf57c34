// One forward pass: the tensors that autograd saves in it, each storage once.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "actnn/saving/native/held.hpp"
#include "actnn/saving/native/model_tensors.hpp"
#include "actnn/saving/native/module_paths.hpp"
#include "actnn/saving/native/ops.hpp"
#include "actnn/saving/native/records.hpp"

namespace actnn {

// A tensor that is saved, and what is read of it once.
class Look {
 public:
    explicit Look(const nanobind::handle &tensor);
    bool requires_grad() const;
    int64_t nbytes() const { return d.elements() * d.bytes; }
    const nanobind::object &storage() const;
    // The tensor of which it is a view, or None.
    const nanobind::object &base() const;
    // The same, or the tensor itself.
    const nanobind::object &around() const { return base().is_none() ? tensor : base(); }
    // What made it; null for a leaf.
    const Op *op() const;
    // Holds it until backward.
    nanobind::object kept(int64_t held, const std::shared_ptr<Counter> &counter) const;

    const nanobind::object tensor;
    Description d;
    const bool is_described;  // of no subclass, strided, on a CPU or GPU
    const int64_t version;

 private:
    mutable nanobind::object storage_, base_;
    mutable std::optional<bool> requires_grad_;
    mutable std::optional<const Op *> op_;
};

// A table that remembers what the n-th look-up of a step has found: that of the next step mostly
// finds the same.
template <class Key, class Value>
class Recalled {
 public:
    // Returns the value of a key; a new one is empty. n: of the record.
    Value &at(size_t n, const Key &key) {
        if (recent_.size() <= n) recent_.resize(n + 1);
        Entry *&last = recent_[n];
        if (!last || last->first != key) last = &*entries_.try_emplace(key).first;
        return last->second;
    }

 private:
    using Entry = typename std::map<Key, Value>::value_type;
    std::map<Key, Value> entries_;
    std::vector<Entry *> recent_;
};

// What is done with a tensor: the answer of Python's rules.
struct Decision {
    enum Action { keep, encode, other, adapt };
    Action action = keep;
    nanobind::object choice, reason, bounds;
    int64_t bits = 0;
    bool positive = false;  // whether the signs of all elements must be exact
};

// The functions that encode and decode tensors of one size, and the bytes and groups of their
// codes.
struct Coder {
    nanobind::object encode, decode, shape, strides, dtype;
    int64_t held = 0, groups = 0;
};

// Decisions and coders that stay valid as long as the settings do.
class Decisions {
 public:
    // op of the tensor that is held and of the saved one, path and class of the module, dtype,
    // whether it looks like heads of attention, is an input of a checkpoint, is to be exact
    using Key =
        std::tuple<const Op *, const Op *, PyObject *, PyObject *, uint32_t, bool, bool, bool>;
    Recalled<Key, Decision> decisions;
    // a decision and its bits, shape and strides, device, whether the memory is aligned
    using CoderKey = std::tuple<const Decision *, int64_t, std::vector<int64_t>, int64_t, bool>;
    Recalled<CoderKey, Coder> coders;
    std::vector<nanobind::object> named;  // what keys have the addresses of
    struct Form {
        nanobind::object shape, dtype;
    };
    // Dtype and shape -> these. Tensors of one form share these objects.
    Recalled<std::vector<int64_t>, Form> forms;
};

// What the first steps find out about kinds of tensors, and later some of them; it stays valid for
// good.
class Uses {
 public:
    // paths of the module, op of the tensor that is held and of the saved one, dtype
    using Key = std::tuple<std::string, const Op *, const Op *, uint32_t>;
    // Counts a step; returns whether it is one that finds out.
    bool begin() {
        const int64_t step = steps_++;
        return step < kFirst || step % kInterval == 0;
    }
    // Whether one step has begun.
    bool is_first() const { return steps_ == 1; }
    bool any() const { return *any_; }
    std::shared_ptr<Use> of(Key key, const nanobind::object &path) {
        std::shared_ptr<Use> &found = uses_[std::move(key)];
        if (!found) found = std::make_shared<Use>(Use{path, any_, warned_});
        return found;
    }
    // What stands for all tensors that never have codes.
    const std::shared_ptr<Use> &other() const { return other_; }

 private:
    static constexpr int64_t kFirst = 3, kInterval = 16;
    std::map<Key, std::shared_ptr<Use>> uses_;
    std::shared_ptr<bool> any_ = std::make_shared<bool>(false);
    std::shared_ptr<bool> warned_ = std::make_shared<bool>(false);
    std::shared_ptr<Use> other_ = std::make_shared<Use>();
    int64_t steps_ = 0;
};

class Step {
 public:
    // by_sample: whether codes may have bits per sample. decides_by_path, caches: whether decisions
    // depend on the path of the module; whether they stay valid. adaptive: whether `_share` is to
    // know of shared tensors.
    Step(int64_t min_bytes, bool by_sample, bool decides_by_path, bool caches, bool adaptive,
         std::shared_ptr<Counter> counter, const ModulePaths &paths, const ModelTensors &model,
         Decisions &decisions, Uses &uses, nanobind::object records)
        : min_bytes_(min_bytes),
          by_sample_(by_sample),
          decides_by_path_(decides_by_path),
          caches_(caches),
          adaptive_(adaptive),
          counter_(std::move(counter)),
          paths_(paths),
          model_(model),
          decisions_(decisions),
          uses_(uses),
          learns_(uses.begin()),
          is_first_(uses.is_first()),
          records_object_(std::move(records)),
          records_(*nanobind::inst_ptr<Records>(records_object_)),
          opaque_(nanobind::none()) {}

    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;

    // Returns a tensor in the form in which it is held for backward.
    nanobind::object pack(const nanobind::handle &tensor);
    // Says that a storage is alive anyway, and why.
    void add_known(const nanobind::handle &tensor, nanobind::object reason);
    void keep_exact(const nanobind::handle &tensor, nanobind::object reason);
    void keep_compared(const nanobind::handle &tensor);
    void claim(const nanobind::handle &codes, nanobind::object reason, nanobind::object instead_of,
               nanobind::object choice);
    void promise(const nanobind::handle &tensor, nanobind::object instead_of, nanobind::object op,
                 nanobind::object choice, const nanobind::object &made, nanobind::object scale);
    void note(nanobind::object reason, nanobind::object instead_of, nanobind::object choice);
    nanobind::object keep_operand(const nanobind::handle &tensor, int64_t nbytes);
    nanobind::list operands() const;
    // Returns what was kept last, or None.
    nanobind::object last_kept() const;
    void forget();
    int64_t next() { return count_++; }
    bool is_first() const { return is_first_; }
    int64_t min_bytes() const { return min_bytes_; }
    nanobind::object records() const { return records_object_; }
    // Whether a weight was computed from parameters and marked as one.
    static bool marked_computed;
    nanobind::object opaque() const { return opaque_; }
    void set_opaque(nanobind::object opaque) { std::swap(opaque_, opaque); }

 private:
    // What a layer says of a tensor that it is about to save.
    struct Claim {
        nanobind::object reason, instead_of, choice, op;
        nanobind::object made, scale;  // the tensor that will be made from it, and how; or none
    };
    // A tensor of a storage that was saved.
    struct Saved {
        uintptr_t address;
        int64_t elements;
        std::vector<int64_t> layout;  // shape and strides, if not dense
        uint32_t kind;
        int64_t version;
        nanobind::object held;  // a weak reference
        size_t record;
        nanobind::object scale;  // makes the tensor from what is held; None if that is the tensor
        int64_t nbytes;          // bytes that torch would hold for it, if no record has them

        bool is(const Saved &other) const {
            return address == other.address && elements == other.elements && kind == other.kind &&
                   version == other.version && layout == other.layout;
        }
    };
    struct Storage {
        WeakStorage reference;          // none while only kept tensors hold the storage
        nanobind::object known, exact;  // why it is alive anyway, or not to be rounded
        bool compared = false;
        std::optional<Claim> claim, normalized;
        std::optional<size_t> replaced;  // the record of a tensor that torch would have saved
        std::vector<Saved> saved;
    };
    struct Operand {
        nanobind::object packed, tensor;
        int64_t version;
        size_t record;
    };

    nanobind::handle self() const { return nanobind::find(*this); }
    Storage &storage_of(const nanobind::handle &tensor);
    // What is known of the storage that has an address now.
    Storage &fresh(uintptr_t address);
    Saved key_of(const Look &look, bool dense) const;
    // whole: what is held of a tensor or around it. dense: whether that has no gaps.
    nanobind::object hold(const Look &whole, bool dense, const Look &part, Storage &storage,
                          const std::optional<Claim> &instead);
    nanobind::object why_kept(const Look &look, bool &alive);
    Decision decide(const Look &whole, const Look &part, const Where &where,
                    const nanobind::object &exact, const nanobind::object &op,
                    const Decision *&cached);
    nanobind::object encode(const Look &look, bool dense, const Decision &decision,
                            const Decision *cached, const nanobind::object &intervals);
    nanobind::object keep(const Look &look, nanobind::object reason, int64_t nbytes,
                          nanobind::object choice = {}, nanobind::object path = {},
                          nanobind::object op = {}, std::shared_ptr<Use> use = {});
    // Whether a storage of so many bytes is held as a whole, as it is.
    bool is_held(uintptr_t address, int64_t nbytes) const;
    void record(const Look &look, int64_t nbytes, int64_t held, nanobind::object reason,
                nanobind::object choice = {}, nanobind::object path = {}, nanobind::object op = {});
    void record_instead(const Claim &claim, int64_t held);
    void remember(const Look &look, const nanobind::object &packed, size_t record);

    int64_t min_bytes_;
    bool by_sample_, decides_by_path_;
    bool caches_, adaptive_;
    std::shared_ptr<Counter> counter_;
    const ModulePaths &paths_;
    const ModelTensors &model_;
    Decisions &decisions_;
    Uses &uses_;
    bool learns_, is_first_;
    nanobind::object records_object_;
    Records &records_;
    nanobind::object opaque_;
    std::vector<int64_t> form_;  // dtype and shape of a tensor
    std::unordered_map<uintptr_t, Storage> storages_;
    std::deque<Operand> operands_;
    nanobind::object last_kept_;                            // a weak reference
    std::unordered_map<int64_t, nanobind::object> states_;  // device -> state of the noise
    int64_t count_ = 0;
};

}  // namespace actnn
