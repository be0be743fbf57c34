// Recurrences of layers: the directions that share a launch, and what launches have in common.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "cuda/host/launches.hpp"

namespace quant_gru::cuda {

// Directions that share a launch of the persistent recurrence.
struct Group {
    std::vector<size_t> directions;
    Form form;
    std::optional<RecurrenceShape> shape;  // nothing if weights do not fit registers
};

// The launches of some directions of a layer.
std::vector<Group> grouped(const Launches &to, size_t layer, const std::vector<size_t> &directions);

// Sets the numbers of a cell in the arguments of its persistent recurrence.
template <class Arguments, class Real>
void fill_recurrent(Draft<Arguments> &draft, RecurrentC<Real> &p, Cell &cell, const Group &group,
                    Place Wx) {
    const Fragments R = cell.fragments(group.shape->features, group.shape->units);
    p.weights = R.weights;
    p.bias = R.bias;
    p.m = R.m;
    draft.point(p.Wx, Wx);
    p.exact_float = cell.exact_R();
    p.cell = cell.gates<Real>();
    if (group.form.saturated) p.saturated = cell.saturated();
}

// Codes of a sequence in their containers.
struct CodeSequence {
    Place x, h0, out, last;
    bool reverse;
    Place held{Block::fixed};  // bools (T, N, H): units that keep their state in a step; or null

    bool has_held() const { return held.block != Block::fixed || held.offset; }

    // Sets the arguments `s` of a recurrence.
    template <class Arguments>
    void fill(const Launches &to, const Cell &cell, Draft<Arguments> &draft, SequenceC &s) const {
        s = to.sequence_of(cell);
        s.reverse = reverse;
        draft.point(s.x, x);
        draft.point(s.h0, h0);
        draft.point(s.out, out);
        draft.point(s.last, last);
        draft.point(s.lengths, {Block::lengths});
        draft.point(s.held, held);
    }
};

// Adds the recurrences of a layer on codes, one sequence for each direction: in one launch where
// weights fit registers, otherwise step by step, and in wide integers beyond 16 bits.
void add_code_layer(Launches &to, size_t layer, const std::vector<CodeSequence> &sequences);

}  // namespace quant_gru::cuda
