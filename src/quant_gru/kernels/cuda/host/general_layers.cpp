// The launches of layers of any width and size. Codes pass between launches in their containers.
#include "cuda/host/recurrences.hpp"

namespace quant_gru::cuda {
namespace {

struct QuantizeC {
    Address real, codes, nan, lengths;
    int64_t step, next, T, N, features, stride, kind, zero;
    double lo, hi;
    float scale;
};

struct SpreadC {
    Address nan, before[2], out[2], last[2], all, lengths;
    int64_t T, N, stride, directions;
};

struct RequantizeC {
    Address codes[2], to;
    int64_t kind[2], zero[2], M[2], k[2], rows, H, directions, to_kind, lo, hi, out_zero;
};

struct DequantizeC {
    Address codes, real, nan;
    int64_t step, next, T, N, features, stride, kind, zero;
    float scale;
};

class GeneralLayers {
 public:
    explicit GeneralLayers(Launches &to)
        : to_(to),
          net_(to.layers),
          D_(static_cast<size_t>(net_.directions)),
          T_(to.T),
          N_(to.N),
          H_(to.H()) {}

    void add() {
        nan_ = flags();
        for (size_t i = 0; i < net_.layers(); ++i) {
            for (size_t d = 0; d < D_; ++d) x_[d] = input_codes(i, d);
            std::vector<CodeSequence> sequences;
            for (size_t d = 0; d < D_; ++d) sequences.push_back(sequence_of(i, d));
            add_code_layer(to_, i, sequences);
            spread();
            for (size_t d = 0; d < D_; ++d) dequantize_last(i, d);
        }
        for (size_t d = 0; d < D_; ++d) dequantize_results(d);
    }

 private:
    Place flags() { return to_.reserve(N_ * to_.flag_stride()); }

    // The codes of a layer's input for a direction.
    Place input_codes(size_t layer, size_t d) {
        const Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &x = cell.numbers().x;
        const Place codes = to_.reserve(T_ * N_ * cell.C() * container_bytes(x.container()));
        if (layer) {
            requantize(layer, cell, codes);
            return codes;
        }
        Draft<QuantizeC> p = quantization(cell.border(), T_, cell.C(), codes, nan_);
        to_.read(p, p.arguments);
        p->stride = to_.flag_stride();
        p.point(p->lengths, {Block::lengths});
        to_.add(border("quantize_wide"), rows_grid(T_ * N_), p);
        return codes;
    }

    Kernel border(const char *function) const {
        const CellNumbers &any = net_.cell(0, 0).numbers();
        Kernel kernel{"boundary/wide_border", function, kPlain};
        kernel.macros["QG_RULE"] = std::to_string(any.rounding);
        kernel.macros["QG_INPUT_RULE"] = std::to_string(any.rounding_input);
        return kernel;
    }

    Draft<QuantizeC> quantization(const QuantizerNumbers &q, int64_t steps, int64_t features,
                                  Place codes, Place nan) const {
        Draft<QuantizeC> p;
        p.point(p->codes, codes);
        p.point(p->nan, nan);
        p->T = steps;
        p->N = N_;
        p->features = features;
        p->kind = kind_of(q);
        p->zero = q.zero;
        p->lo = static_cast<double>(q.lo() - q.zero);
        p->hi = static_cast<double>(q.hi() - q.zero);
        p->scale = q.scale;
        return p;
    }

    void requantize(size_t layer, const Cell &cell, Place codes) {
        const QuantizerNumbers &x = cell.numbers().x;
        Draft<RequantizeC> p;
        for (size_t d = 0; d < D_; ++d) {
            const QuantizerNumbers &h = net_.cell(layer - 1, d).numbers().h;
            p.point(p->codes[d], out_[d]);
            p->kind[d] = kind_of(h);
            p->zero[d] = h.zero;
            p->M[d] = cell.between()[d].M[0];
            p->k[d] = cell.between()[d].k;
        }
        p.point(p->to, codes);
        p->rows = T_ * N_;
        p->H = H_;
        p->directions = static_cast<int64_t>(D_);
        p->to_kind = kind_of(x);
        p->lo = x.lo() - x.zero;
        p->hi = x.hi() - x.zero;
        p->out_zero = x.zero;
        to_.add(border("requantize_wide"), rows_grid(T_ * N_), p);
    }

    // The codes of a direction, the first of which are added.
    CodeSequence sequence_of(size_t layer, size_t d) {
        const Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &h = cell.numbers().h;
        const int64_t code = container_bytes(h.container());
        const Place first = to_.reserve(N_ * H_ * code);
        before_[d] = to_.reserve(N_);
        out_[d] = to_.reserve(T_ * N_ * H_ * code);
        last_[d] = to_.reserve(N_ * H_ * code);
        Draft<QuantizeC> q = quantization(h, 1, H_, first, before_[d]);
        q->next = H_;
        q->stride = 1;
        q.point(q->real, to_.h0() + first_of(layer, d));
        to_.add(border("quantize_wide"), rows_grid(N_), q);

        return {x_[d], first, out_[d], last_[d], d == 1};
    }

    int64_t first_of(size_t layer, size_t d) const {
        return 4 * static_cast<int64_t>(layer * D_ + d) * N_ * H_;
    }

    // Follows NaN through a layer.
    void spread() {
        Draft<SpreadC> p;
        p.point(p->nan, nan_);
        for (size_t d = 0; d < D_; ++d) {
            out_nan_[d] = flags();
            last_nan_[d] = to_.reserve(N_);
            p.point(p->before[d], before_[d]);
            p.point(p->out[d], out_nan_[d]);
            p.point(p->last[d], last_nan_[d]);
        }
        nan_ = flags();
        p.point(p->all, nan_);
        p.point(p->lengths, {Block::lengths});
        p->T = T_;
        p->N = N_;
        p->stride = to_.flag_stride();
        p->directions = static_cast<int64_t>(D_);
        Grid grid;
        grid.x = static_cast<unsigned>((N_ + 255) / 256);
        grid.threads = 256;
        to_.add(border("spread_nan"), grid, p);
    }

    Draft<DequantizeC> dequantization(const QuantizerNumbers &h, int64_t steps, Place codes,
                                      Place nan) const {
        Draft<DequantizeC> p;
        p.point(p->codes, codes);
        p.point(p->nan, nan);
        p->T = steps;
        p->N = N_;
        p->features = H_;
        p->kind = kind_of(h);
        p->zero = h.zero;
        p->scale = h.scale;
        return p;
    }

    void dequantize_last(size_t layer, size_t d) {
        Draft<DequantizeC> p =
            dequantization(net_.cell(layer, d).numbers().h, 1, last_[d], last_nan_[d]);
        p->next = H_;
        p->stride = 1;
        p.point(p->real, to_.h_n() + first_of(layer, d));
        to_.add(border("dequantize_wide"), rows_grid(N_), p);
    }

    void dequantize_results(size_t d) {
        Draft<DequantizeC> p =
            dequantization(net_.cell(net_.layers() - 1, d).numbers().h, T_, out_[d], out_nan_[d]);
        p->step = N_ * to_.width();
        p->next = to_.width();
        p->stride = to_.flag_stride();
        p.point(p->real, to_.y() + 4 * static_cast<int64_t>(d) * H_);
        to_.add(border("dequantize_wide"), rows_grid(T_ * N_), p);
    }

    Launches &to_;
    const Layers &net_;
    const size_t D_;
    const int64_t T_, N_, H_;
    Place nan_{Block::space};  // NaN flags of the input of the layer
    // by direction: codes, and NaN flags
    std::array<Place, 2> x_{}, out_{}, last_{}, before_{}, out_nan_{}, last_nan_{};
};

}  // namespace

void add_general_layers(Launches &to) { GeneralLayers(to).add(); }

}  // namespace quant_gru::cuda
