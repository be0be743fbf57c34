#include "bindings/tensor_cell.hpp"

#include <algorithm>

#include "bindings/gpu_numbers.hpp"
#include "bindings/plan_from_dict.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

using cuda::Address;
using cuda::DerivedArrays;
using cuda::WeightsC;

class TensorCell : public cuda::Cell {
 public:
    TensorCell(nb::object owner, CellArrays &arrays, const TermNumbers &sums, Address finite)
        : Cell(arrays.numbers, arrays.gates, arrays.form, terms(sums)),
          owner_(std::move(owner)),
          derived_(arrays.derived),
          finite_(finite) {
        places_ = arrays.places;
    }

    Address multipliers_R() const override { return derived_.multipliers(1); }
    Address finite() const override { return finite_; }
    Address exact_W() const override { return derived_.exact(0); }
    Address exact_R() const override { return derived_.exact(1); }
    Address tiles() override { return derived_.tiles(); }
    cuda::MatrixC W() const override { return derived_.matrix(0); }
    std::array<cuda::MatrixC, 2> transposed() override {
        return {derived_.transposed(0), derived_.transposed(1)};
    }
    cuda::GemmWeights gemm(int which) override { return derived_.gemm(which); }
    cuda::ByteWeights bytes() const override { return derived_.bytes(); }
    cuda::Fragments fragments(int64_t features, int64_t units) override {
        return derived_.fragments(features, units);
    }

 private:
    static std::vector<SumNumbers> terms(const TermNumbers &sums) {
        std::vector<SumNumbers> found;
        for (const auto &[k, M] : sums) found.push_back({1, k, {M, 0}});
        return found;
    }

    nb::object owner_;
    DerivedArrays &derived_;
    Address finite_;
};

DerivedArrays::Allocate allocator(nb::object function) {
    return [function = std::move(function)](int64_t bytes) {
        return nb::cast<Address>(function(bytes));
    };
}

// Launches with a warp for each row, on one matrix or both.
nb::tuple rows_launch(const char *source, const char *function, unsigned matrices,
                      const WeightsC &a, int64_t warps) {
    const auto *start = reinterpret_cast<const unsigned char *>(&a);
    const cuda::Grid grid{static_cast<unsigned>((warps + 7) / 8), matrices, 256};
    return launch_tuple({{source, function, cuda::kPlain}, grid, {start, start + sizeof a}, {}},
                        dict_of(cuda::kPlain));
}

nb::list derivations(const std::vector<WeightsC> &given) {
    nb::list found;
    for (const WeightsC &each : given) {
        // A thread for each feature, and one more.
        const int64_t threads = std::max(each.operands[0].K, each.operands[1].K) + 1;
        found.append(rows_launch("weights/derive", "begin_derived", 2, each, (threads + 31) / 32));
        found.append(rows_launch("weights/derive", "derive_weights", 2, each, 3 * each.H));
    }
    return found;
}

// The launches of an update in training, which share their arguments. numbers: see weights_plan.
// kinds: containers of codes of W and bw, and of R and br.
// space: for the scales of W, bw, R and br, (4, 3H) float64. corrected: for bw with the correction
// of `factors` (3H), or 0 without one.
nb::list update_launches(const nb::dict &numbers,
                         const std::array<std::array<int64_t, 2>, 2> &kinds, Address space,
                         Address corrected) {
    const WeightsPlan plan = weights_plan(numbers);
    const auto at = [](const void *p) { return reinterpret_cast<Address>(p); };
    WeightsC a{};
    a.H = plan.H;
    a.free = plan.free_scale;
    a.finite = at(plan.finite);
    for (size_t i = 0; i < 2; ++i) {
        const WeightTarget &t = plan.targets[i];
        const QuantizerNumbers q{t.bits, true, 1, 0}, b_q{t.b_bits, true, 1, 0};
        const Address scales = space + 48 * i * static_cast<Address>(a.H);
        cuda::OperandC o{0,
                         0,
                         0,
                         scales,
                         scales + 24 * static_cast<Address>(a.H),
                         at(t.codes),
                         at(t.b_codes),
                         at(t.scales),
                         at(t.b_scales),
                         at(t.B),
                         at(t.M),
                         at(t.k)};
        o.factors = at(t.factors);
        o.corrected = t.factors ? corrected : 0;
        std::tie(o.kind, o.b_kind) = std::tie(kinds[i][0], kinds[i][1]);
        std::tie(o.K, o.bits, o.b_bits, o.significant, o.unit_exponent) =
            std::tie(t.n, t.bits, t.b_bits, t.significant, t.unit_exponent);
        std::tie(o.lo, o.hi, o.b_lo, o.b_hi) = std::make_tuple(q.lo(), q.hi(), b_q.lo(), b_q.hi());
        std::tie(o.operand_scale, o.result_scale, o.b_unit, o.limit, o.term_limit) =
            std::tie(t.operand_scale, t.result_scale, t.b_unit, t.limit, t.term_limit);
        a.operands[i] = o;
    }
    nb::list found;
    found.append(rows_launch("weights/row_scales", "row_scales", 2, a, 3 * a.H));
    if (corrected) found.append(rows_launch("weights/correct_bias", "correct_bias", 1, a, 3 * a.H));
    found.append(rows_launch("weights/requantize", "requantize_weights", 2, a, 3 * a.H));
    return found;
}

WeightsC &update_at(uintptr_t arguments) { return *reinterpret_cast<WeightsC *>(arguments); }

// Lets an update read W, R, bw or br, by index, of a real dtype.
void set_weight(uintptr_t arguments, size_t index, Address weight, int64_t real) {
    cuda::OperandC &o = update_at(arguments).operands[index % 2];
    (index < 2 ? o.w : o.b) = weight;
    (index < 2 ? o.w_real : o.b_real) = real;
}

// Lets it drop codes of R, where flags at an address say so; 0 for none. keep: 1 - p.
void set_dropped(uintptr_t arguments, Address dropped, float keep) {
    update_at(arguments).operands[1].dropped = dropped;
    update_at(arguments).keep = keep;
}

using PlaceTuple = std::tuple<Address, Address, Address, Address>;
using StoredTuple = std::tuple<Address, Address, Address, Address, int>;

void make_arrays(CellArrays *self, nb::object gates, const cuda::Form &form,
                 const std::array<int, 2> &sizes, const std::array<int, 2> &bits,
                 const std::array<PlaceTuple, 3> &tables, const std::array<StoredTuple, 2> &given,
                 nb::object allocate) {
    const auto *numbers = nb::cast<const cuda::GateNumbers *>(gates);
    const std::shared_ptr<const cuda::GateNumbers> shared(numbers,
                                                          [](const cuda::GateNumbers *) {});
    CellNumbers all = numbers->numbers;
    all.W.inputs = sizes[0];
    all.H = all.R.inputs = sizes[1];
    all.W.weight_bits = bits[0];
    all.R.weight_bits = bits[1];
    std::array<cuda::TableAddresses, 3> places{};
    std::array<cuda::StoredMatrix, 2> stored{};
    for (size_t i = 0; i < 3; ++i) {
        const auto [direct, lines, bounds, coefficients] = tables[i];
        places[i] = {direct, lines, bounds, coefficients};
    }
    for (size_t i = 0; i < 2; ++i) {
        const auto [codes, bias, M, k, kind] = given[i];
        stored[i] = {codes, bias, M, k, static_cast<Container>(kind)};
    }
    CellNumbers inner = all;
    inner.x = all.x.inner();
    new (self)
        CellArrays{std::move(gates), shared, form,
                   places,           all,    {inner, form, stored, allocator(std::move(allocate))}};
}

void copy_arrays(CellArrays *self, const CellArrays &other, nb::object allocate) {
    new (self)
        CellArrays{other.owner,  other.gates,   other.form,
                   other.places, other.numbers, {other.derived, allocator(std::move(allocate))}};
}

}  // namespace

std::unique_ptr<cuda::Cell> cell_of(const CellTuple &given) {
    const auto &[arrays, sums, finite] = given;
    return std::make_unique<TensorCell>(arrays, nb::cast<CellArrays &>(arrays), sums, finite);
}

void bind_cell_arrays(nb::module_ &m) {
    nb::class_<CellArrays>(m, "CellArrays")
        .def("__init__", &make_arrays)
        .def("__init__", &copy_arrays)
        .def("multipliers", [](CellArrays &a, int which) { return a.derived.multipliers(which); })
        .def("exact", [](CellArrays &a, int which) { return a.derived.exact(which); })
        .def("gemm",
             [](CellArrays &a, int which) {
                 const cuda::GemmWeights g = a.derived.gemm(which);
                 return nb::make_tuple(g.weights, g.folded);
             })
        .def("byte_weights",
             [](CellArrays &a) {
                 const cuda::ByteWeights b = a.derived.bytes();
                 return nb::make_tuple(b.folded_bytes, b.m_float);
             })
        .def("tiles", [](CellArrays &a) { return a.derived.tiles(); })
        .def("transposed",
             [](CellArrays &a, int which) { return a.derived.transposed(which).codes; })
        .def("fragments",
             [](CellArrays &a, int64_t features, int64_t units) {
                 const cuda::Fragments f = a.derived.fragments(features, units);
                 return nb::make_tuple(f.weights, f.bias, f.m);
             })
        .def_prop_ro("count", [](const CellArrays &a) { return a.derived.count(); })
        .def("take_new", [](CellArrays &a) { return derivations(a.derived.take_new()); })
        .def("launches", [](const CellArrays &a) { return derivations(a.derived.arguments()); })
        .def("add_to", [](const CellArrays &a, uintptr_t update) {
            return a.derived.add_to(update_at(update));
        });
    m.def("update_launches", &update_launches);
    m.def("set_weight", &set_weight);
    m.def("set_dropped", &set_dropped);
    m.attr("PLAIN") = dict_of(cuda::kPlain);
}

}  // namespace quant_gru
