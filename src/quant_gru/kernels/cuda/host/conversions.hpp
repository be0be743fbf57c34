// Launches that convert tensors of real values to another dtype or layout.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda/host/launches.hpp"
#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// At most four conversions share a launch. Results are contiguous.
class Conversions {
 public:
    struct Added {
        Draft<ConversionsC> &draft;
        RowsC &rows;
    };
    // shape: T, N and features. The source is contiguous unless the caller sets other strides; its
    // kinds are dtypes. The reference is valid until the next call.
    Added add(const std::array<int64_t, 3> &shape, int kind, int to_kind, Place real, Place to) {
        if (launches_.empty() || launches_.back().count == std::size(ConversionsC{}.each))
            launches_.emplace_back();
        One &last = launches_.back();
        RowsC &rows = last.draft->each[last.count++];
        const auto &[T, N, features] = shape;
        rows.kind = kind;
        rows.to_kind = to_kind;
        rows.step = rows.to_step = N * features;
        rows.next = rows.to_next = features;
        rows.T = T;
        rows.N = N;
        rows.features = features;
        last.draft.point(rows.real, real);
        last.draft.point(rows.to, to);
        last.most = std::max(last.most, T * N);
        return {last.draft, rows};
    }

    std::vector<Launch> launches() const {
        std::vector<Launch> found;
        for (const One &each : launches_) {
            Grid grid = rows_grid(each.most);
            grid.y = static_cast<unsigned>(each.count);
            found.push_back(launch_of({"boundary/convert_rows", "convert", {}}, grid, each.draft));
        }
        return found;
    }

 private:
    struct One {
        Draft<ConversionsC> draft;
        size_t count = 0;
        int64_t most = 0;  // rows
    };
    std::vector<One> launches_;
};

}  // namespace quant_gru::cuda
