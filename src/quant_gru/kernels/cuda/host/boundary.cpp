#include "cuda/host/boundary.hpp"

#include <algorithm>

namespace quant_gru::cuda {

Draft<BorderC> border_of(const QuantizerNumbers &q, int64_t rows, int64_t features) {
    Draft<BorderC> draft;
    draft->kind = kind_of(q);
    draft->rows = rows;
    draft->features = features;
    draft->zero = q.zero;
    draft->scale = q.scale;
    draft->lo = static_cast<float>(q.lo() - q.zero);
    draft->hi = static_cast<float>(q.hi() - q.zero);
    return draft;
}

Draft<MaskC> mask_of(const QuantizerNumbers &q, int64_t step, int64_t next,
                     const std::array<int64_t, 3> &shape) {
    Draft<MaskC> draft;
    draft->step = step;
    draft->next = next;
    draft->rows = shape[0] * shape[1];
    draft->N = shape[1];
    draft->features = shape[2];
    draft->scale = q.scale;
    draft->lo = static_cast<float>(q.lo() - q.zero);
    draft->hi = static_cast<float>(q.hi() - q.zero);
    return draft;
}

Draft<RequantizeCodesC> requantization_of(const std::vector<Below> &below,
                                          const QuantizerNumbers &above, int64_t rows, int64_t H) {
    Draft<RequantizeCodesC> draft;
    for (size_t d = 0; d < below.size(); ++d) {
        draft->kind[d] = kind_of(below[d].h);
        draft->zero[d] = below[d].h.zero;
        draft->M[d] = below[d].sum.M[0];
        draft->k[d] = below[d].sum.k;
    }
    draft->rows = rows;
    draft->H = H;
    draft->directions = static_cast<int64_t>(below.size());
    draft->to_kind = kind_of(above);
    draft->lo = above.lo() - above.zero;
    draft->hi = above.hi() - above.zero;
    draft->to_zero = above.zero;
    return draft;
}

Launch events_of(const EventsC &events) {
    constexpr int64_t kMostBlocks = 1 << 16;
    Grid grid;
    grid.x = static_cast<unsigned>(std::min(events.A * events.B, kMostBlocks));
    grid.threads = 128;
    Draft<EventsC> draft;
    draft.arguments = events;
    return launch_of({"boundary/random_events", "events", {}}, grid, draft);
}

}  // namespace quant_gru::cuda
