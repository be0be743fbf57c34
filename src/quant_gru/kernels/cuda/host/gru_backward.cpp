#include "cuda/host/gru_backward.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "cuda/host/boundary.hpp"
#include "cuda/host/conversions.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {
namespace {

// Memory after that of the layers, which share one block; its start is known at the end.
constexpr auto kAfterLayers = static_cast<Block>(kBlockCount + 1);
constexpr int64_t kFirstTensor = kBlockCount + 2;

Place place_of(int64_t tensor, int64_t offset = 0) {
    return {static_cast<Block>(kFirstTensor + tensor), offset};
}
Place place_of(GRUTensor tensor, int64_t offset = 0) {
    return place_of(static_cast<int64_t>(tensor), offset);
}

constexpr Place kAbsent{Block::fixed};

Place number(int64_t value) { return {Block::fixed, value}; }

int64_t elements(const std::array<int64_t, 3> &shape) { return shape[0] * shape[1] * shape[2]; }

// The numbers of `like` for contiguous tensors (T, N, features).
RealLayout contiguous(const std::array<int64_t, 3> &shape) {
    return {0, shape[1] * shape[2], shape[2], 1};
}

class Lister {
 public:
    Lister(std::vector<GRUCell> cells, int64_t directions, const GRUBackwardForm &form,
           Address zero, const BackwardPrecision &precision, const Clusters &clusters,
           const BackwardPolicy &policy)
        : cells_(std::move(cells)),
          D_(directions),
          T_(form.T),
          N_(form.N),
          H_(cells_.at(0).cell->H()),
          count_(static_cast<int64_t>(cells_.size())),
          of_cell_((static_cast<int64_t>(form.wanted.size()) - 2) / count_),
          form_(form),
          zero_(zero),
          precision_(precision),
          clusters_(clusters),
          policy_(policy),
          x_(form.x),
          grad_(form.grad_y) {
        const auto gradients = static_cast<int64_t>(form.wanted.size());
        for (int64_t i = 0; i < gradients; ++i)
            results_.push_back(place_of(static_cast<int64_t>(GRUTensor::outs) + count_ + i));
    }

    GRUBackward listed() && {
        convert_inputs();
        for (int64_t layer = count_ / D_ - 1; layer >= 0; --layer) {
            const bool onward = is_wanted_below(layer);
            add_layer(layer, onward);
            if (!onward) break;
            add_masks(layer);
        }
        add(outward_);
        for (GRUBackwardStep &step : made_.steps) {
            if (step.launch)
                for (Field &each : step.launch->fields) resolve(each.place);
            for (GradientProduct &each : step.products) resolve(each.result);
        }
        made_.space = layers_ + after_;
        return std::move(made_);
    }

 private:
    using Shape = std::array<int64_t, 3>;

    const CellNumbers &numbers(int64_t index) const { return at(index).numbers(); }
    Cell &at(int64_t index) const { return *cells_[static_cast<size_t>(index)].cell; }
    int64_t C(int64_t layer) const { return at(layer * D_).C(); }

    bool is_wanted(int64_t gradient) const { return form_.wanted[static_cast<size_t>(gradient)]; }
    // Whether the gradient of W (0), R, bw or br of a cell is wanted.
    bool is_wanted(int64_t index, int64_t weight) const {
        return weight < of_cell_ && is_wanted(2 + of_cell_ * index + weight);
    }
    const Place &result(int64_t index, int64_t weight) const {
        return results_[static_cast<size_t>(2 + of_cell_ * index + weight)];
    }
    // Whether a gradient of x, h0 or weights below this layer is wanted.
    bool is_wanted_below(int64_t layer) const {
        const int64_t end = layer ? 2 + of_cell_ * D_ * layer : 1;
        return std::any_of(form_.wanted.begin(), form_.wanted.begin() + end,
                           [](bool each) { return each; });
    }

    // memory

    // Memory after that of the layers; rooms with equal arguments are the same.
    Place room(int64_t bytes, const std::string &name, int64_t first = 0, int64_t second = 0) {
        const auto key = std::make_tuple(bytes, name, first, second);
        const auto found = rooms_.find(key);
        if (found != rooms_.end()) return {kAfterLayers, found->second};
        const int64_t start = take(after_, bytes);
        rooms_.emplace(key, start);
        return {kAfterLayers, start};
    }

    void resolve(Place &place) const {
        if (place.block == kAfterLayers) place = {Block::space, layers_ + place.offset};
    }

    // launches

    void push(Launch launch) { made_.steps.push_back({std::move(launch), {}, {}}); }
    template <class Arguments>
    void add(const char *source, const char *function, const Grid &grid,
             const Draft<Arguments> &draft) {
        push(launch_of({std::string("boundary/") + source, function, plain_of(numbers(0))}, grid,
                       draft));
    }

    void add(const Conversions &conversions) {
        for (Launch &each : conversions.launches()) push(std::move(each));
    }

    // Converts what callers give in another form than kernels read, and makes room for gradients
    // that they want in another form than kernels write.
    void convert_inputs() {
        Conversions inward;
        const Place starts = place_of(GRUTensor::lengths, 8 * N_);
        const Shape values{T_, N_, C(0)}, output{T_, N_, D_ * H_}, states{count_, N_, H_};
        const auto take_in = [&](GRUTensor tensor, const RealLayout *given, const Shape &shape,
                                 bool is_state) {
            const Place from = place_of(tensor);
            if (!given || !(form_.is_packed || given->kind)) return from;
            const Place to = room(4 * elements(shape), "converted", static_cast<int64_t>(tensor));
            const auto [draft, rows] = inward.add(shape, given->kind, 0, from, to);
            rows.step = given->step;
            rows.next = given->next;
            if (form_.is_packed && is_state) draft.point(rows.order, place_of(GRUTensor::sorted));
            if (form_.is_packed && !is_state) draft.point(rows.packed, starts);
            return to;
        };
        const auto pointer = [](const std::optional<RealLayout> &each) {
            return each ? &*each : nullptr;
        };
        x_at_ = take_in(GRUTensor::x, &form_.x, values, false);
        h0_at_ = take_in(GRUTensor::h0, pointer(form_.h0), states, true);
        grad_at_ = take_in(GRUTensor::grad_y, pointer(form_.grad_y), output, false);
        last_at_ = take_in(GRUTensor::grad_last, pointer(form_.grad_last), states, true);
        if (x_at_.block == kAfterLayers) x_ = contiguous(values);
        if (grad_ && grad_at_.block == kAfterLayers) grad_ = contiguous(output);
        take_out(0, values, form_.x.kind);
        take_out(1, states, form_.h0 ? form_.h0->kind : 0);
        for (int64_t index = 0; index < count_; ++index) {
            const int64_t features = at(index).C();
            const Shape shapes[] = {
                {1, 3 * H_, features}, {1, 3 * H_, H_}, {1, 1, 3 * H_}, {1, 1, 3 * H_}};
            for (int64_t i = 0; i < of_cell_; ++i)
                take_out(2 + of_cell_ * index + i, shapes[i], form_.weights);
        }
        add(inward);
    }
    void take_out(int64_t gradient, const Shape &shape, int kind) {
        const bool is_packed = form_.is_packed && gradient < 2;
        if (!is_wanted(gradient) || !(is_packed || kind)) return;
        Place &result = results_[static_cast<size_t>(gradient)];
        const Place to = result;
        result = room(4 * elements(shape), "to convert", gradient);
        const auto [draft, rows] = outward_.add(shape, 0, kind, result, to);
        if (!is_packed) return;
        if (gradient)
            draft.point(rows.order, place_of(GRUTensor::unsorted));
        else
            draft.point(rows.to_packed, place_of(GRUTensor::lengths, 8 * N_));
    }

    // a layer

    struct Input {
        Place at;
        RealLayout layout;
    };

    void add_layer(int64_t layer, bool onward) {
        const int64_t first = layer * D_;
        const std::vector<Input> inputs = add_inputs(layer);
        std::vector<std::array<Place, kSlotCount>> slots;
        for (int64_t d = 0; d < D_; ++d)
            slots.push_back(slots_of(first + d, d, inputs[static_cast<size_t>(d)]));
        WantedGradients wanted{onward, false, false, false, false};
        for (int64_t d = 0; d < D_; ++d) {
            wanted.W |= is_wanted(first + d, 0);
            wanted.R |= is_wanted(first + d, 1);
            wanted.bw |= is_wanted(first + d, 2);
            wanted.br |= is_wanted(first + d, 3);
        }
        if (D_ == 1 || are_alike(first)) {
            add_directions(layer, 0, D_, slots, wanted);
        } else {
            add_directions(layer, 0, 1, slots, wanted);
            add_directions(layer, 1, 2, slots, wanted);
        }
        if (!is_wanted(1)) return;
        for (int64_t d = 0; d < D_; ++d) {
            const int64_t index = first + d, start = 4 * N_ * H_ * index;
            mask(numbers(index).h, {0, N_ * H_, H_, 1}, {1, N_, H_}, h0_at_ + start,
                 results_[1] + start);
        }
    }

    // Whether both directions of a layer fit the same launches.
    bool are_alike(int64_t first) const {
        const CellNumbers &a = numbers(first), &b = numbers(first + 1);
        return at(first).form() == at(first + 1).form() && a.x.bits == b.x.bits &&
               a.h.bits == b.h.bits && a.W.weight_bits == b.W.weight_bits &&
               a.R.weight_bits == b.R.weight_bits;
    }

    // Returns the input of each direction; that of upper layers is made by launches.
    std::vector<Input> add_inputs(int64_t layer) {
        if (!layer) return std::vector<Input>(static_cast<size_t>(D_), {x_at_, x_});
        std::vector<Input> found;
        std::map<std::string, Input> known;  // directions often have the same input
        for (int64_t d = 0; d < D_; ++d) {
            Draft<RequantizeCodesC> draft = requantization(layer, d);
            const std::string same(reinterpret_cast<const char *>(&draft.arguments),
                                   sizeof draft.arguments);
            const auto before = known.find(same);
            if (before != known.end()) {
                found.push_back(before->second);
                continue;
            }
            const Shape shape{T_, N_, C(layer)};
            const auto bytes = container_bytes(numbers(layer * D_ + d).x.container());
            const Input input{room(elements(shape) * bytes, "input", d), contiguous(shape)};
            draft.point(draft->to, input.at);
            read_codes(draft, layer);
            add("requantize_training", "requantize_codes", rows_grid(T_ * N_), draft);
            known.emplace(same, input);
            found.push_back(input);
        }
        return found;
    }

    // From the codes of the layer below to the input of a direction.
    Draft<RequantizeCodesC> requantization(int64_t layer, int64_t d) const {
        const int64_t index = layer * D_ + d;
        std::vector<Below> below;
        for (int64_t i = 0; i < D_; ++i)
            below.push_back(
                {numbers((layer - 1) * D_ + i).h, at(index).between().at(static_cast<size_t>(i))});
        return requantization_of(below, numbers(index).x, T_ * N_, H_);
    }
    void read_codes(Draft<RequantizeCodesC> &draft, int64_t layer) const {
        for (int64_t d = 0; d < D_; ++d)
            draft.point(draft->codes[static_cast<size_t>(d)], codes_of((layer - 1) * D_ + d));
    }
    Place codes_of(int64_t index) const {
        return place_of(static_cast<int64_t>(GRUTensor::outs) + index);
    }

    std::array<Place, kSlotCount> slots_of(int64_t index, int64_t d, const Input &input) {
        std::array<Place, kSlotCount> slots;
        slots.fill(kAbsent);
        const auto slot = [&slots](Slot each) -> Place & {
            return slots[static_cast<size_t>(each)];
        };
        const int64_t state = 4 * N_ * H_;
        slot(index < D_ ? Slot::values : Slot::x) = input.at;
        slot(Slot::x_step) = number(input.layout.step);
        slot(Slot::x_next) = number(input.layout.next);
        slot(Slot::out) = codes_of(index);
        slot(Slot::nan) = place_of(GRUTensor::nan, 4 * N_ * index);
        const Place dh0 = room(state, "dh0", d);
        slot(Slot::dh0) = is_wanted(1) ? results_[1] + state * index : dh0;
        if (form_.h0) slot(Slot::h0) = add_state(index, d);
        if (form_.is_packed) slot(Slot::lengths) = place_of(GRUTensor::lengths);
        if (form_.grad_last) slot(Slot::grad_last) = last_at_ + state * index;
        if (grad_) {
            slot(Slot::grad_out) = grad_at_ + 4 * d * H_ * grad_->unit;
            slot(Slot::grad_step) = number(grad_->step);
            slot(Slot::grad_next) = number(grad_->next);
            slot(Slot::grad_unit) = number(grad_->unit);
        } else {
            slot(Slot::grad_out) = number(static_cast<int64_t>(zero_));
        }
        if (is_wanted(index, 2)) slot(Slot::bw) = result(index, 2);
        if (is_wanted(index, 3)) slot(Slot::br) = result(index, 3);
        const auto &weights = cells_[static_cast<size_t>(index)].weights;
        for (size_t i = 0; i < weights.size(); ++i)
            slots[static_cast<size_t>(Slot::W) + i] = number(static_cast<int64_t>(weights[i]));
        return slots;
    }

    // Adds the launch that quantizes an initial state, and returns the place of its codes.
    Place add_state(int64_t index, int64_t d) {
        const QuantizerNumbers &h = numbers(index).h;
        const Place codes = room(N_ * H_ * container_bytes(h.container()), "h0", d);
        Draft<BorderC> draft = border_of(h, N_, H_);
        draft.point(draft->real, h0_at_ + 4 * N_ * H_ * index);
        draft.point(draft->codes, codes);
        draft.point(draft->nan, room(N_, "nan of h0"));
        add("quantize_dequantize", "quantize", rows_grid(N_), draft);
        return codes;
    }

    void mask(const QuantizerNumbers &q, const RealLayout &layout, const Shape &shape, Place real,
              Place grad, const std::optional<Place> &added = {}) {
        Draft<MaskC> draft = mask_of(q, layout.step, layout.next, shape);
        draft.point(draft->real, real);
        draft.point(draft->grad, grad);
        if (added) draft.point(draft->added, *added);
        add("clamp_mask", "mask_clamped", rows_grid(draft->rows), draft);
    }

    // Adds the steps of directions from `d` to `end`, with the products of their gradients.
    void add_directions(int64_t layer, int64_t d, int64_t end,
                        const std::vector<std::array<Place, kSlotCount>> &slots,
                        const WantedGradients &wanted) {
        std::vector<BackwardDirection> directions;
        for (int64_t i = d; i < end; ++i) {
            const GRUCell &cell = cells_[static_cast<size_t>(layer * D_ + i)];
            BackwardDirection &each = directions.emplace_back();
            each.cell = cell.cell.get();
            each.reverse = i == 1;
            each.weight_kinds = cell.weight_kinds;
            each.at = slots[static_cast<size_t>(i)];
        }
        LayerBackward made =
            layer_backward(directions, T_, N_, wanted, precision_, clusters_, policy_);
        for (BackwardStep &each : made.steps)
            made_.steps.push_back({std::move(each.launch), std::move(each.matrices), {}});
        add_products(layer, d, made);
        layers_ = std::max(layers_, made.space);
    }

    void add_products(int64_t layer, int64_t d, const LayerBackward &made) {
        std::vector<GradientProduct> products;
        for (const LayerBackward::Results &each : made.directions) {
            const std::optional<LastProduct> *const all[] = {&each.x, &each.W, &each.R};
            for (int64_t i = 0; i < 3; ++i) {
                if (!*all[i]) continue;
                const LastProduct &product = **all[i];
                const int64_t rows = product.transposed ? product.left.columns : product.left.rows;
                const Place to = target(layer, d, i, 4 * rows * product.right.columns);
                products.push_back({product, to});
            }
            ++d;
        }
        if (!products.empty()) made_.steps.push_back({{}, {}, std::move(products)});
    }

    // Where a product writes the gradient of x (0), W or R.
    Place target(int64_t layer, int64_t d, int64_t which, int64_t bytes) {
        if (which == 0) {
            // the gradient of the last direction accumulates the others
            if (!layer && d == D_ - 1) return results_[0];
            // the layer below reads it while writing its own gradient, so two buffers alternate
            return room(bytes, "x", d, layer % 2);
        }
        const int64_t index = layer * D_ + d;
        if (is_wanted(index, which - 1)) return result(index, which - 1);
        // wanted for the other direction only
        return room(bytes, which == 1 ? "W" : "R");
    }

    // Adds launches that mask the gradient of a layer's input and sum it over directions.
    void add_masks(int64_t layer) {
        const Shape shape{T_, N_, C(layer)};
        std::vector<Place> targets;
        for (int64_t d = 0; d < D_; ++d)
            targets.push_back(target(layer, d, 0, 4 * elements(shape)));
        for (int64_t d = 0; d < D_; ++d) {
            const Place grad = targets[static_cast<size_t>(d)];
            if (!layer) {
                mask(numbers(d).x, x_, shape, x_at_, grad,
                     d ? std::optional(targets[0]) : std::nullopt);
                continue;
            }
            Draft<RequantizeCodesC> draft = requantization(layer, d);
            read_codes(draft, layer);
            draft.point(draft->grad, grad);
            if (d) draft.point(draft->added, targets[0]);
            add("requantize_training", "requantize_codes", rows_grid(T_ * N_), draft);
        }
        grad_at_ = targets.back();
        grad_ = contiguous(shape);
    }

    std::vector<GRUCell> cells_;
    const int64_t D_, T_, N_, H_, count_, of_cell_;
    const GRUBackwardForm &form_;
    const Address zero_;
    const BackwardPrecision precision_;
    const Clusters &clusters_;
    const BackwardPolicy &policy_;

    // Inputs as kernels read them, and where kernels write gradients.
    RealLayout x_;
    std::optional<RealLayout> grad_;  // of the output of a layer
    Place x_at_{}, h0_at_{}, grad_at_{}, last_at_{};
    std::vector<Place> results_;
    Conversions outward_;

    int64_t layers_ = 0, after_ = 0;  // bytes of the largest layer, and of the memory after it
    std::map<std::tuple<int64_t, std::string, int64_t, int64_t>, int64_t> rooms_;
    GRUBackward made_{{}, 0};
};

}  // namespace

int64_t tensor_of(const Place &place) {
    return place.block == Block::space ? 0 : static_cast<int64_t>(place.block) - kFirstTensor;
}

GRUBackward gru_backward(std::vector<GRUCell> cells, int64_t directions,
                         const GRUBackwardForm &form, Address zero,
                         const BackwardPrecision &precision, const Clusters &clusters,
                         const BackwardPolicy &policy) {
    return Lister(std::move(cells), directions, form, zero, precision, clusters, policy).listed();
}

}  // namespace quant_gru::cuda
