#include "bindings/tensor_cell.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

using cuda::Address;
using cuda::DerivedArrays;

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

nb::list bytes_of(const std::vector<cuda::WeightsC> &launches) {
    nb::list found;
    for (const cuda::WeightsC &each : launches)
        found.append(nb::bytes(reinterpret_cast<const char *>(&each), sizeof each));
    return found;
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
        .def("take_new", [](CellArrays &a) { return bytes_of(a.derived.take_new()); })
        .def("arguments", [](const CellArrays &a) { return bytes_of(a.derived.arguments()); })
        .def("add_to", [](const CellArrays &a, uintptr_t update) {
            return a.derived.add_to(*reinterpret_cast<cuda::WeightsC *>(update));
        });
}

}  // namespace quant_gru
