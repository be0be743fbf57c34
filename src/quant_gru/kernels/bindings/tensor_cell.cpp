#include "bindings/tensor_cell.hpp"

#include <cstring>

namespace nb = nanobind;

namespace quant_gru {
namespace {

// A cell whose arrays are tensors of Python. `arrays` returns addresses.
class TensorCell : public cuda::Cell {
 public:
    TensorCell(const CellNumbers &numbers, std::shared_ptr<const cuda::GateNumbers> gates,
               const cuda::Form &form, const TablePlaces &tables, const TermNumbers &sums,
               nb::object arrays)
        : Cell(numbers, std::move(gates), form, terms(sums)), arrays_(std::move(arrays)) {
        for (size_t i = 0; i < tables.size(); ++i) {
            const auto [direct, lines, bounds, coefficients] = tables[i];
            places_[i] = {direct, lines, bounds, coefficients};
        }
    }

    cuda::Address multipliers_R() const override { return address("multipliers_R"); }
    cuda::Address finite() const override { return address("finite"); }
    cuda::Address exact_W() const override { return address("exact_W"); }
    cuda::Address exact_R() const override { return address("exact_R"); }
    cuda::Address tiles() override { return address("tiles"); }
    cuda::MatrixC W() const override { return record(call("W")); }
    std::array<cuda::MatrixC, 2> transposed() override {
        const auto found = nb::cast<std::pair<nb::bytes, nb::bytes>>(call("transposed"));
        return {record(found.first), record(found.second)};
    }
    cuda::GemmWeights gemm(int which) override {
        using Found = std::tuple<cuda::Address, cuda::Address, int64_t, int64_t, int>;
        const auto [weights, folded, columns, padded, planes] =
            nb::cast<Found>(arrays_.attr("gemm")(which));
        return {weights, folded, columns, 0, padded, planes};
    }
    cuda::ByteWeights bytes() const override {
        using Found =
            std::tuple<cuda::Address, cuda::Address, cuda::Address, cuda::Address, int64_t>;
        const auto [weights, folded, folded_bytes, m_float, padded] =
            nb::cast<Found>(call("bytes"));
        return {weights, folded, folded_bytes, m_float, padded};
    }
    cuda::Fragments fragments(int64_t features, int64_t units) override {
        using Found = std::tuple<cuda::Address, cuda::Address, cuda::Address>;
        const auto [weights, bias, m] = nb::cast<Found>(arrays_.attr("fragments")(features, units));
        return {weights, bias, m};
    }

 private:
    static std::vector<SumNumbers> terms(const TermNumbers &sums) {
        std::vector<SumNumbers> found;
        for (const auto &[k, M] : sums) found.push_back({1, k, {M, 0}});
        return found;
    }
    static cuda::MatrixC record(const nb::object &bytes) {
        const nb::bytes given = nb::cast<nb::bytes>(bytes);
        cuda::MatrixC found{};
        if (given.size() != sizeof found) throw nb::value_error("Expected the bytes of a MatrixC");
        std::memcpy(&found, given.c_str(), sizeof found);
        return found;
    }
    nb::object call(const char *name) const { return arrays_.attr(name)(); }
    cuda::Address address(const char *name) const { return nb::cast<cuda::Address>(call(name)); }

    nb::object arrays_;
};

}  // namespace

std::unique_ptr<cuda::Cell> cell_of(const CellTuple &given) {
    const auto &[gates, form, sizes, bits, tables, sums, arrays] = given;
    const nb::object owner = gates;
    const std::shared_ptr<const cuda::GateNumbers> shared(
        nb::cast<const cuda::GateNumbers *>(owner), [owner](const cuda::GateNumbers *) {});
    CellNumbers numbers = shared->numbers;
    numbers.W.inputs = sizes[0];
    numbers.H = numbers.R.inputs = sizes[1];
    numbers.W.weight_bits = bits[0];
    numbers.R.weight_bits = bits[1];
    return std::make_unique<TensorCell>(numbers, shared, form, tables, sums, arrays);
}

}  // namespace quant_gru
