#include "cpu/training/backward.hpp"

#include <algorithm>
#include <utility>

#include "cpu/core/threads.hpp"

namespace quant_gru {
namespace {

// Rows of a block, and bytes that what is known of a chunk takes where one step takes no more.
constexpr int64_t kBlockRows = 256, kChunkBytes = 32 << 20;
// Multiply-accumulates, in floats, for which a thread pays.
constexpr double kPays = 4e6;

int64_t lines(int64_t bytes) { return round_up(bytes, 64); }

// Room for real weights of so many columns in panels; `fill_panels` writes them.
Panels empty_panels(int H, int columns, const ProductLayout &layout, Arena &arena) {
    Panels p;
    p.count = (columns + layout.columns - 1) / layout.columns;
    p.channels = int64_t{(H + layout.group - 1) / layout.group} * 3 * layout.group;
    p.data = arena.allocate<float>(static_cast<size_t>(p.count * p.channels * layout.columns));
    return p;
}

// Writes the weights of some units, codes (3H, columns) times scales (3H), channels in groups.
template <class Code>
void fill_panels(const Panels &p, const Code *codes, const float *scales, int H, int columns,
                 const ProductLayout &layout, int64_t first_unit, int64_t end_unit) {
    const int group = layout.group, width = layout.columns;
    for (int64_t unit = first_unit; unit < end_unit; ++unit)
        for (int gate = 0; gate < 3; ++gate) {
            const int64_t row = gate * H + unit;
            const int64_t channel = (unit / group * 3 + gate) * group + unit % group;
            const Code *at = codes + row * columns;
            for (int first = 0; first < columns; first += width) {
                float *to = p.data + (first / width * p.channels + channel) * width;
                const int count = std::min(width, columns - first);
                for (int i = 0; i < count; ++i)
                    to[i] = scales[row] * static_cast<float>(at[first + i]);
            }
        }
}

// The row of PyTorch's order reset, update, candidate.
int64_t pytorch_row(int gate, int64_t unit, int64_t H) {
    return (gate == 0 ? 1 : gate == 1 ? 0 : 2) * H + unit;
}

// One backward: its memory, and the passes over each chunk.
class Backward {
 public:
    Backward(const Layer &layer, const BackwardCall &call)
        : layer_(layer),
          call_(call),
          variant_(layer.variant()),
          layout_(*variant_.product_layout),
          H_(layer.H()),
          C_(layer.C()),
          groups_((H_ + layout_.group - 1) / layout_.group),
          channels_(3 * layout_.group) {
        x_blocks_ = (C_ + layout_.block - 1) / layout_.block;
        h_blocks_ = (H_ + layout_.block - 1) / layout_.block;
        const int64_t blocks = (call.N + kBlockRows - 1) / kBlockRows;
        rows_ = (call.N + blocks - 1) / blocks;
        const int64_t each = 4 * (int64_t{7} * groups_ * layout_.group +
                                  (int64_t{x_blocks_} + h_blocks_) * layout_.block);
        const int64_t most = std::min(call.chunk_items, kChunkBytes / each) / rows_;
        const int64_t together = std::max<int64_t>(kSumItems / rows_, 1);
        chunk_steps_ = std::min(std::max<int64_t>(most / together, 1) * together, call.T);
        const int64_t items = chunk_steps_ * rows_;
        Chunk &c = chunk_;
        c.T = call.T;
        c.N = call.N;
        c.reverse = call.reverse;
        c.lengths = call.lengths;
        c.sum_steps = together;
        c.groups = groups_;
        // groups and blocks do not share the sets of the cache
        c.stride = odd_lines(items * channels_);
        c.direct_stride = odd_lines(items * layout_.group);
        c.code_stride = odd_lines(items * layout_.block);
        R_ = empty_panels(H_, H_, layout_, arena_);
        if (call.dx) W_ = empty_panels(H_, C_, layout_, arena_);
        const int64_t units = int64_t{groups_} * layout_.group;
        width_ = std::max<int64_t>(units, int64_t{R_.count} * layout_.columns);
        dh_ = arena_.allocate<float>(static_cast<size_t>(rows_ * width_));
        if (call.dW) dW_ = sums_of(x_blocks_);
        if (call.dR) dR_ = sums_of(h_blocks_);
        if (call.dbw) dbw_ = bias_of();
        if (call.dbr) dbr_ = bias_of();
    }

    void run() {
        const double each = 3.0 * H_ * (H_ + C_ + 64);
        const double work = std::min(
            each * static_cast<double>(chunk_steps_ * rows_) / (kPays * thread_price), 1e6);
        parts_ = std::max<int64_t>(std::min<int64_t>(call_.threads, static_cast<int64_t>(work)), 1);
        const int64_t space = workspace();
        Aligned chunk(static_cast<size_t>(4 * chunk_floats()));
        Aligned workspaces(static_cast<size_t>(space * parts_));
        place(static_cast<float *>(chunk.data));
        char *const own = static_cast<char *>(workspaces.data);
        in_team(parts_, [&](int64_t index, Team &team) {
            const int64_t size = team.size();
            // there may be fewer threads than parts
            auto each_part = [&](auto work) {
                for (int64_t part = index; part < parts_; part += size) work(part);
            };
            each_part([&](int64_t part) { fill_part(part); });
            team.barrier();
            Chunk now = chunk_;
            for (; now.first_row < call_.N; now.first_row += now.rows) {
                now.rows = std::min(rows_, call_.N - now.first_row);
                each_part([&](int64_t part) { start_rows(now, part); });
                for (int64_t end = call_.T; end > 0; end = now.first_step) {
                    now.first_step = (end - 1) / chunk_steps_ * chunk_steps_;
                    now.steps = end - now.first_step;
                    each_part([&](int64_t part) { run_rows(now, part, own + space * part); });
                    if (!has_products()) continue;
                    team.barrier();
                    each_part([&](int64_t part) { multiply(now, part); });
                    team.barrier();
                }
                each_part([&](int64_t part) { end_rows(now, part); });
                // parts of the next block may be other rows of the same memory
                team.barrier();
            }
            each_part([&](int64_t part) { write_part(part); });
        });
    }

 private:
    static int64_t odd_lines(int64_t floats) {
        const int64_t whole = round_up(floats, 16);
        return whole / 16 % 2 == 0 ? whole + 16 : whole;
    }

    float *sums_of(int blocks) {
        return arena_.allocate<float>(static_cast<size_t>(groups_) * blocks * layout_.block *
                                      channels_);
    }

    double *bias_of() { return arena_.allocate<double>(static_cast<size_t>(groups_) * channels_); }

    int64_t chunk_floats() const {
        return groups_ * (2 * chunk_.stride + chunk_.direct_stride) +
               (int64_t{x_blocks_} + h_blocks_) * chunk_.code_stride;
    }

    void place(float *at) {
        chunk_.Wx = at;
        at += groups_ * chunk_.stride;
        chunk_.Rh = at;
        at += groups_ * chunk_.stride;
        chunk_.direct = at;
        at += groups_ * chunk_.direct_stride;
        chunk_.x = at;
        chunk_.h = at + x_blocks_ * chunk_.code_stride;
    }

    RecurrenceJob recurrence(const Chunk &chunk, int64_t first_row, int64_t end_row) const {
        RecurrenceJob job;
        job.chunk = chunk;
        job.R = R_;
        job.H = H_;
        job.grad_out = call_.grad_out;
        job.grad_step = call_.grad_step;
        job.grad_row = call_.grad_row;
        job.dh = dh_;
        job.width = width_;
        job.states = call_.dh;
        job.first_row = first_row;
        job.end_row = end_row;
        return job;
    }

    // Where a part of n things starts; where it ends, the next one starts.
    int64_t start(int64_t n, int64_t part) const { return n * part / parts_; }

    void fill_part(int64_t part) const {
        fill(R_, call_.R, call_.R_bytes, call_.R_scales, H_, part);
        if (call_.dx) fill(W_, call_.W, call_.W_bytes, call_.W_scales, C_, part);
    }

    void fill(const Panels &p, const void *codes, int bytes, const float *scales, int columns,
              int64_t part) const {
        const int64_t first = start(H_, part), end = start(H_, part + 1);
        auto from = [&](const auto *codes_of_kind) {
            fill_panels(p, codes_of_kind, scales, H_, columns, layout_, first, end);
        };
        if (bytes == 1)
            from(static_cast<const int8_t *>(codes));
        else if (bytes == 2)
            from(static_cast<const int16_t *>(codes));
        else
            from(static_cast<const int32_t *>(codes));
    }

    void write_part(int64_t part) const {
        const int first = static_cast<int>(start(groups_, part));
        const int last = static_cast<int>(start(groups_, part + 1));
        write_weights(dW_, x_blocks_, C_, call_.scales.x, call_.dW, first, last);
        write_weights(dR_, h_blocks_, H_, call_.scales.h, call_.dR, first, last);
        write_bias(dbw_, call_.dbw, first, last);
        write_bias(dbr_, call_.dbr, first, last);
    }

    int64_t workspace() const {
        switch (layer_.kind()) {
            case Layer::Kind::fused:
                return lines(variant_.fused_derivatives_workspace(layer_.fused()));
            case Layer::Kind::general:
                return lines(variant_.general_derivatives_workspace(layer_.general()));
            default:
                return lines(variant_.wide_derivatives_workspace(layer_.wide()));
        }
    }

    void find_derivatives(const DerivativesJob &job) const {
        switch (layer_.kind()) {
            case Layer::Kind::fused:
                return variant_.fused_derivatives(layer_.fused(), job);
            case Layer::Kind::general:
                return variant_.general_derivatives(layer_.general(), job);
            default:
                return variant_.wide_derivatives(layer_.wide(), job);
        }
    }

    // Rows of a part of a block.
    std::pair<int64_t, int64_t> rows_of(const Chunk &chunk, int64_t part) const {
        return {chunk.first_row + start(chunk.rows, part),
                chunk.first_row + start(chunk.rows, part + 1)};
    }

    void start_rows(const Chunk &chunk, int64_t part) const {
        const auto [first, end] = rows_of(chunk, part);
        for (int64_t row = first; row < end; ++row) {
            float *dh = dh_ + (row - chunk.first_row) * width_;
            std::fill(std::copy_n(call_.grad_last + row * H_, H_, dh), dh + width_, 0.f);
        }
    }

    void end_rows(const Chunk &chunk, int64_t part) const {
        const auto [first, end] = rows_of(chunk, part);
        for (int64_t row = first; row < end; ++row)
            std::copy_n(dh_ + (row - chunk.first_row) * width_, H_, call_.dh0 + row * H_);
    }

    bool has_products() const { return dW_ || dR_ || dbw_ || dbr_ || call_.dx; }

    void run_rows(const Chunk &chunk, int64_t part, void *workspace) const {
        const auto [first_row, end_row] = rows_of(chunk, part);
        if (first_row == end_row) return;
        DerivativesJob job;
        job.chunk = chunk;
        job.scales = call_.scales;
        job.x = call_.x;
        job.h0 = call_.h0;
        job.out = call_.out;
        job.held = call_.held;
        job.first_row = first_row;
        job.end_row = end_row;
        job.workspace = workspace;
        find_derivatives(job);
        variant_.recurrence(recurrence(chunk, first_row, end_row));
    }

    void multiply(const Chunk &chunk, int64_t part) const {
        WeightJob job;
        job.chunk = chunk;
        job.x_blocks = x_blocks_;
        job.h_blocks = h_blocks_;
        job.dW = dW_;
        job.dR = dR_;
        job.dbw = dbw_;
        job.dbr = dbr_;
        job.first_group = static_cast<int>(start(groups_, part));
        job.end_group = static_cast<int>(start(groups_, part + 1));
        job.W = W_;
        job.C = C_;
        job.dx = call_.dx;
        job.first_item = start(chunk.steps * chunk.rows, part);
        job.end_item = start(chunk.steps * chunk.rows, part + 1);
        variant_.weight_products(job);
    }

    void write_weights(const float *sums, int blocks, int columns, double scale, float *to,
                       int first, int last) const {
        if (!to) return;
        const int group = layout_.group;
        const float s = static_cast<float>(scale);
        const int64_t units = std::min(H_, last * group);
        for (int64_t unit = first * group; unit < units; ++unit)
            for (int gate = 0; gate < 3; ++gate) {
                const float *from = sums + unit / group * blocks * layout_.block * channels_ +
                                    gate * group + unit % group;
                float *row = to + pytorch_row(gate, unit, H_) * columns;
                for (int i = 0; i < columns; ++i) row[i] = s * from[int64_t{i} * channels_];
            }
    }

    void write_bias(const double *sums, float *to, int first, int last) const {
        if (!to) return;
        const int group = layout_.group, units = std::min(H_, last * group);
        for (int unit = first * group; unit < units; ++unit)
            for (int gate = 0; gate < 3; ++gate)
                to[pytorch_row(gate, unit, H_)] = static_cast<float>(
                    sums[unit / group * channels_ + gate * group + unit % group]);
    }

    const Layer &layer_;
    const BackwardCall &call_;
    const Variant &variant_;
    const ProductLayout &layout_;
    const int H_, C_, groups_, channels_;  // channels of a group
    int x_blocks_ = 0, h_blocks_ = 0;
    int64_t rows_ = 1, chunk_steps_ = 1, width_ = 0, parts_ = 1;
    Chunk chunk_;
    Panels R_, W_;
    float *dh_ = nullptr, *dW_ = nullptr, *dR_ = nullptr;
    double *dbw_ = nullptr, *dbr_ = nullptr;
    Arena arena_;
};

}  // namespace

void run_backward(const Layer &layer, const BackwardCall &call) { Backward(layer, call).run(); }

}  // namespace quant_gru
