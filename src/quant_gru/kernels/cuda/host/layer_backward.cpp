#include "cuda/host/layer_backward.hpp"

#include <algorithm>
#include <string>

#include "cuda/host/plans/backward_structs.hpp"

namespace quant_gru::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kBlocks = 396;     // fill a GPU: 3 per multiprocessor of the largest
constexpr int64_t kFewestRows = 32;  // of byte products of a caller
constexpr int64_t kChannelBytes = 24;
constexpr int64_t kSummed = 256;  // chunks of rows whose bias gradients are added at the end
constexpr double kLargestHalf = 30000;

unsigned count_of(int64_t value) { return static_cast<unsigned>(value); }

// Whether all derivatives of a cell are far below the largest number in half precision.
bool fits_half(const CellNumbers &n) {
    const auto largest = [](const QuantizerNumbers &q) {
        return static_cast<double>(q.reach()) * static_cast<double>(q.scale);
    };
    const double z = largest(n.z), r = largest(n.r), g = largest(n.g), h = largest(n.h);
    const double z_derivative = z * (1 + z), r_derivative = r * (1 + r);
    const double of_R = (1 + z) * std::max({1.0, r, largest(n.Rh) * r_derivative});
    return std::max({(h + g) * z_derivative, of_R, z}) < kLargestHalf;
}

// Buffers for W x (0) or R h (1).
struct ProductBuffers {
    Matrix channels;             // constants of each channel
    Matrix weights, codes;       // bytes, padded
    std::optional<Matrix> sums;  // int32 sums of a chunk that products of the caller compute
    std::optional<Matrix> real_weights;  // operands (3H, features), if a product needs them
    std::optional<Matrix> real_codes;    // operands (T * N, features), if a gradient needs them
};

struct Buffers {
    ProductBuffers of[2];
    Matrix of_R, of_W;  // derivatives: those that the recurrence reads, and the others
    Matrix d;           // gradients of the states after each step
    Matrix dWx, dRh;    // (T * N, 3H), operands
    std::optional<Matrix> transposed;  // R, for a recurrence that is one launch
    std::optional<Matrix> step;        // the product of a step otherwise
    std::optional<Matrix> partial;     // sums of bias gradients
};

class Gatherer {
 public:
    Gatherer(const std::vector<BackwardDirection> &directions, int64_t T, int64_t N,
             const WantedGradients &wanted, const BackwardPrecision &precision,
             const Clusters &clusters, const BackwardPolicy &policy)
        : directions_(directions),
          T_(T),
          N_(N),
          C_(directions[0].cell->C()),
          H_(directions[0].cell->H()),
          rows_(T * N),
          count_(static_cast<int>(directions.size())),
          wanted_(wanted),
          precision_(precision),
          clusters_(clusters),
          policy_(policy) {
        choose();
        for (size_t d = 0; d < directions.size(); ++d) buffers_.push_back(take_buffers());
    }

    LayerBackward gathered() && {
        if (count_ == 2)
            add_operands<2>();
        else
            add_operands<1>();
        if (form().gates.in_float)
            add_derivatives<float>();
        else
            add_derivatives<double>();
        add_recurrence();
        add_projections();
        for (const Buffers &b : buffers_) {
            LayerBackward::Results &found = made_.directions.emplace_back();
            const auto &[W, R] = b.of;
            if (W.real_weights) found.x = LastProduct{b.dWx, *W.real_weights, false};
            if (W.real_codes) found.W = LastProduct{b.dWx, *W.real_codes, true};
            if (R.real_codes) found.R = LastProduct{b.dRh, *R.real_codes, true};
            found.d = b.d;
        }
        return std::move(made_);
    }

 private:
    const Form &form() const { return directions_[0].cell->form(); }
    const CellNumbers &numbers(size_t d) const { return directions_[d].cell->numbers(); }

    void choose() {
        const CellNumbers &n = numbers(0);
        half_ = precision_.half;
        for (const BackwardDirection &each : directions_)
            half_ = half_ && fits_half(each.cell->numbers());
        planes_ = {planes_of(n.x.bits), planes_of(n.h.bits)};
        weight_planes_ = {planes_of(n.W.weight_bits), planes_of(n.R.weight_bits)};
        features_ = {C_, H_};
        for (size_t i = 0; i < 2; ++i) {
            padded_[i] = padded_features(std::max<int64_t>(features_[i], 1));
            columns_[i] = padded_features(weight_planes_[i] == 1 ? 3 * H_ : 6 * H_ + 1);
        }
        in_bytes_ = std::max({planes_[0], planes_[1], weight_planes_[0], weight_planes_[1]}) == 1;
        if (in_bytes_ && policy_.from_bytes) {
            const std::pair<int64_t, int64_t> padded{padded_[0], padded_[1]};
            const int64_t tables = form().gates.table_bytes;
            if (const auto &given = policy_.derivatives)
                fused_ = DerivativesShape{given->first, given->second, padded, tables};
            else
                fused_ = choose_derivatives(H_, rows_, padded, tables, clusters_.size() > 1);
        }
        const int64_t row = 4 * std::max(columns_[0] * planes_[0], columns_[1] * planes_[1]);
        const int64_t chunks =
            fused_ ? 1 : std::max<int64_t>(1, ceil_div(rows_ * row, policy_.product_bytes));
        chunk_ = ceil_div(rows_, chunks);
        const int parts = precision_.exact_weights && weight_planes_[1] == 2 ? 2 : 1;
        if (policy_.in_clusters)
            in_clusters_ = choose_back_shape(H_, N_, count_, precision_.planes, parts, clusters_);
        if (precision_.operand == 0 && (!in_clusters_ || wants_back_grid())) {
            whole_ = choose_back_grid(H_, N_, clusters_);
            if (whole_) in_clusters_.reset();
        }
        if (in_clusters_)
            layout_ = in_clusters_->layout();
        else if (whole_)
            layout_ = whole_->layout();
        summed_rows_ = std::max<int64_t>(64, ceil_div(rows_, kSummed));
        summed_ = ceil_div(rows_, summed_rows_);
    }

    // memory

    Matrix reserve(int64_t rows, int64_t columns, Element element) {
        const int64_t start = take(made_.space, rows * columns * element_bytes(element));
        return {start, rows, columns, element};
    }
    std::optional<Matrix> reserve_if(bool is_needed, int64_t rows, int64_t columns,
                                     Element element) {
        if (!is_needed) return {};
        return reserve(rows, columns, element);
    }

    ProductBuffers take_product(size_t i) {
        // W for the gradient of x, R for the products of a recurrence in steps
        const bool is_multiplied = i ? !layout_.count : wanted_.x;
        const Element operand = precision_.element();
        ProductBuffers b{};
        b.channels = reserve(3 * H_, kChannelBytes, Element::int8);
        b.real_weights = reserve_if(is_multiplied, 3 * H_, features_[i], operand);
        b.real_codes = reserve_if(i ? wanted_.R : wanted_.W, rows_, features_[i], operand);
        if (fused_) {
            b.weights = reserve(3 * H_, padded_[i], Element::int8);
            b.codes = reserve(rows_, padded_[i], Element::int8);
            return b;
        }
        b.weights = reserve(columns_[i], padded_[i], Element::int8);
        b.codes = reserve(planes_[i] * rows_ + kFewestRows, padded_[i], Element::int8);
        b.sums = reserve(planes_[i] * chunk_ + kFewestRows, columns_[i], Element::int32);
        return b;
    }

    Buffers take_buffers() {
        const Element operand = precision_.element();
        const int64_t words = half_ ? 2 : 4;  // of the derivatives of an element
        Buffers b{};
        b.of[0] = take_product(0);
        b.of[1] = take_product(1);
        b.of_R = reserve(rows_ * H_, words, Element::int32);
        b.of_W = reserve(rows_ * H_, words, Element::int32);
        b.d = reserve(rows_ * H_, 1, Element::float32);
        b.dWx = reserve(rows_, 3 * H_, operand);
        b.dRh = reserve(rows_, 3 * H_, operand);
        b.transposed = reserve_if(layout_.count, layout_.count, 1, Element::int32);
        b.step = reserve_if(!layout_.count, N_, H_, Element::float32);
        b.partial = reserve_if(wanted_.bw || wanted_.br, 6 * summed_, H_, Element::float32);
        return b;
    }

    // launches

    template <class Arguments>
    void add(const char *source, const char *function, const Macros &macros, const Grid &grid,
             const Draft<Arguments> &draft, size_t bytes = sizeof(Arguments)) {
        Kernel kernel{std::string("backward/") + source, function, macros};
        kernel.macros.insert({"DIRS", std::to_string(count_)});
        kernel.macros.insert(kPlain.begin(), kPlain.end());
        made_.steps.push_back({launch_of(std::move(kernel), grid, draft, bytes), {}});
    }

    template <class Arguments, class Member>
    void read(Draft<Arguments> &draft, size_t d, Member &member, Slot slot) const {
        draft.point(member, directions_[d].at[static_cast<size_t>(slot)]);
    }
    template <class Arguments>
    static void point(Draft<Arguments> &draft, Address &member,
                      const std::optional<Matrix> &matrix) {
        if (matrix) draft.point(member, matrix->place());
    }

    Macros operand_macros() const {
        return {{"OPERAND", std::to_string(precision_.operand)}, {"HALF", half_ ? "1" : "0"}};
    }

    template <int kDirections>
    void add_operands() {
        Draft<OperandsC<kDirections>> p;
        p->H = H_;
        p->rows = rows_;
        p->chunk = chunk_;
        for (size_t d = 0; d < kDirections; ++d) {
            for (size_t i = 0; i < 2; ++i) {
                fill_weights(p, p->weights[2 * d + i], d, i);
                fill_codes(p, p->codes[2 * d + i], d, i);
            }
            if (layout_.count) fill_transposed(p, p->transposed[d], d);
        }
        p->of_weights = ceil_div(3 * H_, 8);
        // a thread unpacks at least 8 codes
        p->of_codes = std::min(ceil_div(rows_ * std::max(padded_[0], padded_[1]), 8 * kThreads),
                               policy_.codes_blocks);
        // a warp transposes the tiles of a step
        int64_t of_transposed = 0;
        if (layout_.count)
            of_transposed = ceil_div(layout_.count, kThreads / 32 * 128 * layout_.MT);
        Grid grid;
        grid.x = count_of(kDirections * (2 * (p->of_weights + p->of_codes) + of_transposed));
        grid.threads = kThreads;
        Macros macros = operand_macros();
        macros["HALF"] = "1";
        macros.merge(form().rules.macros());  // inputs are quantized again
        add("operands", "operands", macros, grid, p);
    }

    template <class Arguments>
    void fill_weights(Draft<Arguments> &draft, WeightOperandC &p, size_t d, size_t i) const {
        const ProductBuffers &of = buffers_[d].of[i];
        const QuantizerNumbers &activation = i ? numbers(d).h : numbers(d).x;
        read(draft, d, p.codes, i ? Slot::R : Slot::W);
        read(draft, d, p.scales, i ? Slot::s_R : Slot::s_W);
        read(draft, d, p.bias, i ? Slot::Br : Slot::Bw);
        read(draft, d, p.M, i ? Slot::Mh : Slot::Mx);
        read(draft, d, p.k, i ? Slot::kh : Slot::kx);
        p.kind = directions_[d].weight_kinds[i];
        p.K = features_[i];
        p.padded = padded_[i];
        p.planes = weight_planes_[i];
        p.offset = byte_offset(activation);
        p.zero = activation.zero;
        p.max_abs = activation.reach();
        p.activation_planes = planes_[i];
        p.activation_scale = activation.scale;
        draft.point(p.channels, of.channels.place());
        draft.point(p.bytes, of.weights.place());
        point(draft, p.real, of.real_weights);
    }

    template <class Arguments>
    void fill_codes(Draft<Arguments> &draft, CodeOperandC &p, size_t d, size_t i) const {
        const ProductBuffers &of = buffers_[d].of[i];
        const QuantizerNumbers &activation = i ? numbers(d).h : numbers(d).x;
        if (i) {
            read(draft, d, p.codes, Slot::out);
            read(draft, d, p.before, Slot::h0);
        } else {
            read(draft, d, p.codes, Slot::x);
            read(draft, d, p.values, Slot::values);
            read(draft, d, p.step, Slot::x_step);
            read(draft, d, p.next, Slot::x_next);
        }
        p.kind = kind_of(activation);
        p.K = features_[i];
        p.padded = padded_[i];
        p.planes = planes_[i];
        p.offset = byte_offset(activation);
        p.zero = activation.zero;
        p.N = N_;
        p.states = static_cast<int64_t>(i);
        p.reverse = directions_[d].reverse;
        p.scale = activation.scale;
        p.lo = static_cast<float>(activation.lo() - activation.zero);
        p.hi = static_cast<float>(activation.hi() - activation.zero);
        draft.point(p.bytes, of.codes.place());
        point(draft, p.real, of.real_codes);
    }

    template <class Arguments>
    void fill_transposed(Draft<Arguments> &draft, TransposedC &p, size_t d) const {
        read(draft, d, p.codes, Slot::R);
        p.kind = directions_[d].weight_kinds[1];
        p.H = H_;
        p.U = layout_.U;
        p.CL = layout_.CL;
        p.MT = layout_.MT;
        p.KS = layout_.KS;
        p.KP = layout_.KP;
        p.WP = layout_.WP;
        p.groups = layout_.groups;
        p.count = layout_.count;
        point(draft, p.to, buffers_[d].transposed);
        if (!whole_) return;
        read(draft, d, p.scales, Slot::s_R);
        p.activation_scale = numbers(d).h.scale;
    }

    // derivatives

    template <class Real>
    void add_derivatives() {
        const Gates &gates = form().gates;
        Macros macros = form().products();
        macros["REAL"] = gates.in_float ? "float" : "double";
        macros["OPERAND"] = "0";
        macros["HALF"] = half_ ? "1" : "0";
        macros["QG_WORDS"] = form().words ? "1" : "0";
        const char *const names[] = {"TZ", "TR", "TG"};
        for (size_t i = 0; i < 3; ++i) macros[names[i]] = std::to_string(gates.tables[i]);
        if (fused_) return add_derivatives_of_bytes<Real>(macros);
        macros["BYTES"] = in_bytes_ ? "1" : "0";
        for (int64_t first = 0; first < rows_; first += chunk_) {
            const int64_t count = std::min(chunk_, rows_ - first);
            for (const Buffers &b : buffers_)
                for (size_t i = 0; i < 2; ++i) {
                    const int64_t taken = std::max(planes_[i] * count, kFewestRows);
                    const ProductBuffers &of = b.of[i];
                    made_.steps.push_back({{},
                                           {of.codes.part(planes_[i] * first, taken), of.weights,
                                            of.sums->part(0, taken)}});
                }
            add_derivatives_of_sums<Real>(macros, first, count);
        }
    }

    template <class Real>
    void add_derivatives_of_bytes(Macros macros) {
        const auto [grid, share] =
            fused_->grid(H_, rows_, count_, static_cast<int64_t>(clusters_.at(1)));
        macros.merge(fused_->macros());
        Draft<std::array<DerivativesOfBytesC<Real>, 2>> draft;
        for (size_t d = 0; d < directions_.size(); ++d) {
            DerivativesOfBytesC<Real> &p = draft.arguments[d];
            const QuantizerNumbers &h = numbers(d).h;
            p.share = share;
            p.h_less = byte_offset(h) - h.zero;
            fill_bytes(draft, p.W, d, 0);
            fill_bytes(draft, p.R, d, 1);
            fill_derivatives(draft, p, d, rows_);
        }
        add("local_derivatives_bytes", "derivatives_bytes", macros, grid, draft,
            directions_.size() * sizeof(DerivativesOfBytesC<Real>));
    }

    template <class Real>
    void add_derivatives_of_sums(const Macros &macros, int64_t first, int64_t count) {
        Draft<std::array<DerivativesC<Real>, 2>> draft;
        for (size_t d = 0; d < directions_.size(); ++d) {
            DerivativesC<Real> &p = draft.arguments[d];
            read(draft, d, p.out, Slot::out);
            read(draft, d, p.h0, Slot::h0);
            p.h_kind = kind_of(numbers(d).h);
            p.T = T_;
            p.reverse = directions_[d].reverse;
            p.first = first;
            fill_sums(draft, p.W, d, 0);
            fill_sums(draft, p.R, d, 1);
            fill_derivatives(draft, p, d, count);
        }
        const int64_t across = ceil_div(H_, 32) * count_;
        Grid grid;
        grid.x = count_of(std::min(ceil_div(count, 8), std::max<int64_t>(1, kBlocks / across)));
        grid.y = count_of(across);
        grid.threads = kThreads;
        grid.shared_bytes = count_of(form().gates.table_bytes);
        add("local_derivatives", "derivatives_of", macros, grid, draft,
            directions_.size() * sizeof(DerivativesC<Real>));
    }

    template <class Arguments, class Numbers>
    void fill_derivatives(Draft<Arguments> &draft, Numbers &p, size_t d, int64_t count) const {
        read(draft, d, p.lengths, Slot::lengths);
        read(draft, d, p.held, Slot::held);
        draft.point(p.of_R, buffers_[d].of_R.place());
        draft.point(p.of_W, buffers_[d].of_W.place());
        p.N = N_;
        p.H = H_;
        p.rows = count;
        fill_gates(p.gates, d);
    }
    template <class Real>
    void fill_gates(GateScalesC<Real> &gates, size_t d) const {
        const CellNumbers &n = numbers(d);
        gates.s_z = n.z.scale;
        gates.s_r = n.r.scale;
        gates.s_g = n.g.scale;
        gates.s_h = n.h.scale;
        gates.s_Rh = n.Rh.scale;
        gates.cell = directions_[d].cell->gates<Real>();
    }

    template <class Arguments, class Part>
    void fill_part(Draft<Arguments> &draft, Part &p, size_t d, size_t i) const {
        const QuantizerNumbers &out = i ? numbers(d).Rh : numbers(d).Wx;
        const int64_t lo = out.lo() - out.zero, hi = out.hi() - out.zero;
        draft.point(p.channels, buffers_[d].of[i].channels.place());
        p.lo = static_cast<double>(lo);
        p.hi = static_cast<double>(hi);
        p.low = static_cast<float>(kMagicFloat + lo);
        p.high = static_cast<float>(kMagicFloat + hi);
    }
    template <class Arguments>
    void fill_sums(Draft<Arguments> &draft, SumsC &p, size_t d, size_t i) const {
        fill_part(draft, p, d, i);
        p.columns = columns_[i];
        p.planes = planes_[i];
        p.weight_planes = weight_planes_[i];
        point(draft, p.product, buffers_[d].of[i].sums);
    }
    template <class Arguments>
    void fill_bytes(Draft<Arguments> &draft, BytesC &p, size_t d, size_t i) const {
        const ProductBuffers &of = buffers_[d].of[i];
        fill_part(draft, p, d, i);
        p.padded = padded_[i];
        draft.point(p.rows, of.codes.place());
        draft.point(p.weights, of.weights.place());
    }

    // the recurrence

    void add_recurrence() {
        if (in_clusters_) return add_in_clusters();
        // one direction after the other, since each may need the whole GPU
        for (size_t d = 0; d < directions_.size(); ++d)
            if (whole_)
                add_over_whole_gpu(d);
            else
                add_all_steps(d);
    }

    template <class Arguments, class Numbers>
    void fill_recurrence(Draft<Arguments> &draft, Numbers &p, size_t d) const {
        read(draft, d, p.grad_out, Slot::grad_out);
        read(draft, d, p.grad_last, Slot::grad_last);
        read(draft, d, p.nan, Slot::nan);
        read(draft, d, p.lengths, Slot::lengths);
        read(draft, d, p.dh0, Slot::dh0);
        read(draft, d, p.stride_t, Slot::grad_step);
        read(draft, d, p.stride_n, Slot::grad_next);
        read(draft, d, p.stride_h, Slot::grad_unit);
        draft.point(p.derivatives, buffers_[d].of_R.place());
        draft.point(p.d, buffers_[d].d.place());
        p.N = N_;
        p.H = H_;
    }

    void add_in_clusters() {
        Draft<std::array<BackC, 2>> draft;
        for (size_t d = 0; d < directions_.size(); ++d) {
            BackC &p = draft.arguments[d];
            fill_recurrence(draft, p, d);
            p.T = T_;
            p.reverse = directions_[d].reverse;
            read(draft, d, p.scales, Slot::s_R);
            point(draft, p.weights, buffers_[d].transposed);
        }
        const BackShape &shape = *in_clusters_;
        Grid grid;
        grid.x = count_of(ceil_div(N_, shape.rows) * shape.blocks);
        grid.y = count_of(count_);
        grid.threads = count_of(shape.threads());
        grid.cluster = count_of(shape.blocks);
        grid.shared_bytes = count_of(shape.shared_bytes());
        add("recurrence", "back", shape.macros(half_, 0, count_), grid, draft,
            directions_.size() * sizeof(BackC));
    }

    void add_over_whole_gpu(size_t d) {
        const BackGridShape &shape = *whole_;
        const Matrix &dRh = buffers_[d].dRh;
        // blocks wait for gradients of others until they are not -1
        made_.steps.push_back({{}, {{dRh.start, dRh.rows, dRh.columns / 2, Element::int32}}});
        Draft<BackGridC> p;
        fill_recurrence(p, p.arguments, d);
        p->T = T_;
        p->reverse = directions_[d].reverse;
        p->scale = numbers(d).h.scale;
        p.point(p->dRh, dRh.place());
        point(p, p->weights, buffers_[d].transposed);
        Grid grid;
        grid.x = count_of(shape.groups() * shape.blocks);
        grid.y = count_of(ceil_div(N_, shape.rows()));
        grid.threads = count_of(shape.threads());
        grid.cluster = count_of(shape.blocks);
        grid.shared_bytes = count_of(shape.shared_bytes());
        grid.together = true;
        add("recurrence_grid", "back_grid", shape.macros(half_), grid, p);
    }

    // A product and a launch per step, for weights that do not fit registers.
    void add_all_steps(size_t d) {
        const Buffers &b = buffers_[d];
        Draft<BackStepC> p;
        fill_recurrence(p, p.arguments, d);
        p->scale = numbers(d).h.scale;
        p.point(p->dRh, b.dRh.place());
        point(p, p->product, b.step);
        Grid grid;
        grid.x = count_of(N_);
        grid.y = count_of(ceil_div(H_, kThreads));
        grid.threads = kThreads;
        for (int64_t i = 0; i < T_; ++i) {
            p->t = directions_[d].reverse ? i : T_ - 1 - i;
            add("recurrence_step", "back_step", operand_macros(), grid, p);
            made_.steps.push_back(
                {{}, {b.dRh.part(p->t * N_, N_), *b.of[1].real_weights, *b.step}});
            p->started = 1;
        }
        p->t = -1;
        add("recurrence_step", "back_step", operand_macros(), grid, p);
    }

    // gradients of projections and biases

    void add_projections() {
        Draft<std::array<OuterC, 2>> draft;
        for (size_t d = 0; d < directions_.size(); ++d) fill_outer(draft, draft.arguments[d], d);
        const int64_t wide = H_ % 2 == 0 ? 2 : 1;
        const size_t bytes = directions_.size() * sizeof(OuterC);
        Macros macros = operand_macros();
        macros["WIDE"] = std::to_string(wide);
        Grid grid;
        grid.x = count_of(summed_);
        grid.y = count_of(ceil_div(H_, 32 * wide) * count_);
        grid.threads = kThreads;
        grid.shared_bytes = count_of(8 * 6 * 32 * 4 * wide);
        add("projection_gradients", "outer", macros, grid, draft, bytes);
        if (!wanted_.bw && !wanted_.br) return;
        grid.x = count_of(ceil_div(6 * H_, 32));
        grid.y = count_of(count_);
        grid.shared_bytes = 8 * 32 * 4;
        add("projection_gradients", "outer_sums", macros, grid, draft, bytes);
    }

    template <class Arguments>
    void fill_outer(Draft<Arguments> &draft, OuterC &p, size_t d) const {
        const Buffers &b = buffers_[d];
        read(draft, d, p.bw, Slot::bw);
        read(draft, d, p.br, Slot::br);
        p.rows = rows_;
        p.H = H_;
        p.chunk = summed_rows_;
        p.chunks = summed_;
        p.scale_x = numbers(d).x.scale;
        p.scale_h = numbers(d).h.scale;
        draft.point(p.of_R, b.of_R.place());
        draft.point(p.of_W, b.of_W.place());
        draft.point(p.d, b.d.place());
        point(draft, p.partial, b.partial);
        // the kernel skips a gradient whose pointer is null
        if (wanted_.x || wanted_.W) draft.point(p.dWx, b.dWx.place());
        if (in_clusters_ && wanted_.R) draft.point(p.dRh, b.dRh.place());
    }

    const std::vector<BackwardDirection> &directions_;
    const int64_t T_, N_, C_, H_, rows_;
    const int count_;
    const WantedGradients wanted_;
    const BackwardPrecision precision_;
    const Clusters &clusters_;
    const BackwardPolicy &policy_;

    bool half_ = false, in_bytes_ = false;
    // of W x, and of R h
    std::array<int64_t, 2> features_{}, padded_{}, columns_{}, planes_{}, weight_planes_{};
    int64_t chunk_ = 0;  // rows whose derivatives a launch computes
    std::optional<DerivativesShape> fused_;
    // the recurrence; if there is neither, each step is a launch and a product
    std::optional<BackShape> in_clusters_;
    std::optional<BackGridShape> whole_;
    TransposedLayout layout_;
    int64_t summed_rows_ = 0, summed_ = 0;  // of bias gradients: rows of a sum, and sums
    std::vector<Buffers> buffers_;
    LayerBackward made_{{}, {}, 0};
};

}  // namespace

LayerBackward layer_backward(const std::vector<BackwardDirection> &directions, int64_t T, int64_t N,
                             const WantedGradients &wanted, const BackwardPrecision &precision,
                             const Clusters &clusters, const BackwardPolicy &policy) {
    return Gatherer(directions, T, N, wanted, precision, clusters, policy).gathered();
}

}  // namespace quant_gru::cuda
