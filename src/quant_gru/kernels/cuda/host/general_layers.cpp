// The launches of layers of any width and size: step by step up to 16 bits, otherwise by
// recurrence/wide_integers.cu. Codes pass between launches in their containers.
#include "cuda/host/call.hpp"

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
        : to_(to), net_(to.network), D_(to.network.directions()), T_(to.T), N_(to.N), H_(to.H()) {}

    void add() {
        nan_ = flags();
        for (size_t i = 0; i < net_.layers(); ++i) {
            for (size_t d = 0; d < D_; ++d) x_[d] = input_codes(i, d);
            for (size_t d = 0; d < D_; ++d) add_recurrence(i, d);
            spread();
            for (size_t d = 0; d < D_; ++d) dequantize_last(i, d);
        }
        for (size_t d = 0; d < D_; ++d) dequantize_results(d);
    }

 private:
    Address flags() { return to_.reserve(N_ * to_.flag_stride()); }

    // The codes of a layer's input for a direction.
    Address input_codes(size_t layer, size_t d) {
        const Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &x = cell.numbers().x;
        const Address codes = to_.reserve(T_ * N_ * cell.C() * container_bytes(x.container()));
        if (layer) {
            requantize(layer, cell, codes);
            return codes;
        }
        QuantizeC p = quantization(cell.border(), T_, cell.C(), codes, nan_);
        p.step = to_.x_step();
        p.next = to_.x_next();
        p.stride = to_.flag_stride();
        to_.add(border("quantize_wide"), rows_grid(T_ * N_), p);
        to_.point(place_of(p, p.real), Given::x);
        to_.point(place_of(p, p.lengths), Given::lengths);
        return codes;
    }

    Kernel border(const char *function) {
        const CellNumbers &any = net_.cell(0, 0).numbers();
        Kernel kernel{"boundary/wide_border", function, kPlain};
        kernel.macros["QG_RULE"] = std::to_string(any.rounding);
        kernel.macros["QG_INPUT_RULE"] = std::to_string(any.rounding_input);
        return kernel;
    }

    QuantizeC quantization(const QuantizerNumbers &q, int64_t steps, int64_t features,
                           Address codes, Address nan) const {
        QuantizeC p{};
        p.codes = codes;
        p.nan = nan;
        p.T = steps;
        p.N = N_;
        p.features = features;
        p.kind = kind_of(q);
        p.zero = q.zero;
        p.lo = static_cast<double>(q.lo() - q.zero);
        p.hi = static_cast<double>(q.hi() - q.zero);
        p.scale = q.scale;
        return p;
    }

    void requantize(size_t layer, const Cell &cell, Address codes) {
        const QuantizerNumbers &x = cell.numbers().x;
        RequantizeC p{};
        for (size_t d = 0; d < D_; ++d) {
            const QuantizerNumbers &h = net_.cell(layer - 1, d).numbers().h;
            p.codes[d] = out_[d];
            p.kind[d] = kind_of(h);
            p.zero[d] = h.zero;
            p.M[d] = cell.between()[d].M[0];
            p.k[d] = cell.between()[d].k;
        }
        p.to = codes;
        p.rows = T_ * N_;
        p.H = H_;
        p.directions = static_cast<int64_t>(D_);
        p.to_kind = kind_of(x);
        p.lo = x.lo() - x.zero;
        p.hi = x.hi() - x.zero;
        p.out_zero = x.zero;
        to_.add(border("requantize_wide"), rows_grid(T_ * N_), p);
    }

    void add_recurrence(size_t layer, size_t d) {
        Cell &cell = net_.cell(layer, d);
        const QuantizerNumbers &h = cell.numbers().h;
        const int64_t code = container_bytes(h.container());
        const Address first = to_.reserve(N_ * H_ * code);
        before_[d] = to_.reserve(N_);
        out_[d] = to_.reserve(T_ * N_ * H_ * code);
        last_[d] = to_.reserve(N_ * H_ * code);
        QuantizeC q = quantization(h, 1, H_, first, before_[d]);
        q.next = H_;
        q.stride = 1;
        to_.add(border("quantize_wide"), rows_grid(N_), q);
        to_.point(place_of(q, q.real), Given::h0, first_of(layer, d));

        SequenceC s = to_.sequence_of(cell);
        s.x = x_[d];
        s.h0 = first;
        s.out = out_[d];
        s.last = last_[d];
        s.reverse = d == 1;
        const bool fit = Cell::sums_fit(cell.C()) && Cell::sums_fit(H_);
        if (cell.form().narrow && fit)
            add_steps(to_, cell, s);
        else
            add_generic(cell, s);
    }

    void add_generic(Cell &cell, const SequenceC &s) {
        GenericC p{};
        p.s = s;
        p.s.workspace = to_.reserve(N_ * 2 * H_ * 8);
        p.W = cell.transposed()[0];
        p.R = cell.transposed()[1];
        p.cell = cell.gates<double>();
        const GenericC pair[2] = {p, p};
        Kernel kernel{"recurrence/wide_integers", "generic", {{"QG_WORDS", "1"}}};
        kernel.macros["QG_RULE"] = std::to_string(cell.numbers().rounding);
        kernel.macros.merge(cell.form().products());
        Grid grid;
        grid.x = static_cast<unsigned>(N_);
        grid.threads = 256;
        to_.add(kernel, grid, pair);
        to_.point(place_of(pair, pair[0].s.lengths), Given::lengths);
    }

    int64_t first_of(size_t layer, size_t d) const {
        return 4 * static_cast<int64_t>(layer * D_ + d) * N_ * H_;
    }

    // Follows NaN through a layer.
    void spread() {
        SpreadC p{};
        p.nan = nan_;
        for (size_t d = 0; d < D_; ++d) {
            p.before[d] = before_[d];
            p.out[d] = out_nan_[d] = flags();
            p.last[d] = last_nan_[d] = to_.reserve(N_);
        }
        p.all = nan_ = flags();
        p.T = T_;
        p.N = N_;
        p.stride = to_.flag_stride();
        p.directions = static_cast<int64_t>(D_);
        Grid grid;
        grid.x = static_cast<unsigned>((N_ + 255) / 256);
        grid.threads = 256;
        to_.add(border("spread_nan"), grid, p);
        to_.point(place_of(p, p.lengths), Given::lengths);
    }

    DequantizeC dequantization(const QuantizerNumbers &h, int64_t steps, Address codes,
                               Address nan) const {
        DequantizeC p{};
        p.codes = codes;
        p.nan = nan;
        p.T = steps;
        p.N = N_;
        p.features = H_;
        p.kind = kind_of(h);
        p.zero = h.zero;
        p.scale = h.scale;
        return p;
    }

    void dequantize_last(size_t layer, size_t d) {
        DequantizeC p = dequantization(net_.cell(layer, d).numbers().h, 1, last_[d], last_nan_[d]);
        p.next = H_;
        p.stride = 1;
        to_.add(border("dequantize_wide"), rows_grid(N_), p);
        to_.point(place_of(p, p.real), Given::h_n, first_of(layer, d));
    }

    void dequantize_results(size_t d) {
        DequantizeC p =
            dequantization(net_.cell(net_.layers() - 1, d).numbers().h, T_, out_[d], out_nan_[d]);
        p.step = N_ * to_.width();
        p.next = to_.width();
        p.stride = to_.flag_stride();
        to_.add(border("dequantize_wide"), rows_grid(T_ * N_), p);
        to_.point_results(place_of(p, p.real), 4 * static_cast<int64_t>(d) * H_);
    }

    Launches &to_;
    Network &net_;
    const size_t D_;
    const int64_t T_, N_, H_;
    Address nan_ = 0;  // NaN flags of the input of the layer
    // by direction: codes, and NaN flags
    Address x_[2] = {0, 0}, out_[2] = {0, 0}, last_[2] = {0, 0};
    Address before_[2] = {0, 0}, out_nan_[2] = {0, 0}, last_nan_[2] = {0, 0};
};

}  // namespace

void add_general_layers(Launches &to) { GeneralLayers(to).add(); }

}  // namespace quant_gru::cuda
