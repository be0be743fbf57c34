#include "packed_file.hpp"

#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "columns.hpp"
#include "cpu/core/cell_numbers.hpp"

namespace quant_gru {
namespace {

constexpr int64_t kMostSegments = int64_t{1} << 16, kMostOfAll = int64_t{1} << 22;
constexpr int kOperatorCount = 17, kFirstWeight = 2, kWeights = 4;
// The operators in the order of the document; "" for weights.
const char *const kActivationNames[kOperatorCount] = {"input.x",
                                                      "output.h",
                                                      "",
                                                      "",
                                                      "",
                                                      "",
                                                      "matmul.Wx",
                                                      "matmul.Rh",
                                                      "gate.z_pre",
                                                      "gate.z_out",
                                                      "gate.r_pre",
                                                      "gate.r_out",
                                                      "gate.g_pre",
                                                      "gate.g_out",
                                                      "op.rRh",
                                                      "op.old_contrib",
                                                      "op.new_contrib"};
const char *const kTables[] = {"gate.z_out", "gate.r_out", "gate.g_out"};
// Sums in the order of the file, with their number of terms.
constexpr std::pair<const char *, int> kSums[] = {
    {"gate.z_pre", 2},     {"gate.r_pre", 2},     {"op.rRh", 1},  {"gate.g_pre", 2},
    {"op.old_contrib", 1}, {"op.new_contrib", 1}, {"output.h", 2}};

struct Widths {
    std::array<int, kOperatorCount> bits{};  // 0: a fused product
    std::string is_unsigned;

    explicit Widths(const Json &operators) {
        const Json::Array &given = operators.at("bitwidth").array("bitwidth of the operators");
        is_unsigned = operators.at("is_unsigned").string("is_unsigned of the operators");
        if (given.size() != kOperatorCount || is_unsigned.size() != kOperatorCount ||
            is_unsigned.find_first_not_of("01") != std::string::npos)
            throw FileError("Expected widths and signs of 17 operators");
        for (size_t i = 0; i < given.size(); ++i) {
            const bool is_fusible = i >= kOperatorCount - 3;
            if (!is_fusible || !given[i].is_null())
                bits[i] = static_cast<int>(given[i].integer("bitwidth of an operator", 1, 32));
        }
    }

    int of(const std::string &name) const {
        for (int i = 0; i < kOperatorCount; ++i)
            if (kActivationNames[i] == name) return bits[static_cast<size_t>(i)];
        return 0;
    }
};

int64_t wrapped(uint64_t value) { return static_cast<int64_t>(value); }

// See `_table` in src/quant_gru/parameters/packed.py.
TableColumns read_table(ColumnReader &reader) {
    const std::vector<int64_t> n = reader.column(9);
    const int64_t count = n[0], degree = n[1], u = n[8];
    if (count < 1 || count > kMostSegments || degree < 0 || degree > 2 || u < -1 || u > 32)
        throw FileError("Expected a table of 1 to " + std::to_string(kMostSegments) +
                        " segments of degree 0 to 2 and 2^0 to 2^32 codes, got " +
                        std::to_string(count) + " of degree " + std::to_string(degree) + " and 2^" +
                        std::to_string(u));
    TableColumns t;
    t.degree = degree;
    t.numbers = {n[3], n[4], n[5], n[6], n[7], u};
    std::vector<int64_t> lengths;
    if (u < 0)
        lengths = reader.column(count - 1);
    else
        lengths.assign(static_cast<size_t>(count - 1), int64_t{1} << u);
    const auto width = static_cast<size_t>(degree + 1);
    t.coefficients = reader.column(degree + 1);
    t.coefficients.resize(static_cast<size_t>(count) * width);
    std::vector<std::vector<int64_t>> changes;
    for (size_t p = 0; p < width; ++p) changes.push_back(reader.column(count - 1));
    t.bounds = {n[2]};
    for (size_t i = 0; i + 1 < static_cast<size_t>(count); ++i) {
        // modulo 2^64, as they were written
        const auto L = static_cast<uint64_t>(lengths[i]);
        uint64_t c[3] = {};
        for (size_t p = 0; p < width; ++p)
            c[p] = static_cast<uint64_t>(t.coefficients[i * width + p]);
        const uint64_t moved[3] = {c[0] + c[1] * L + c[2] * L * L, c[1] + 2 * c[2] * L, c[2]};
        for (size_t p = 0; p < width; ++p)
            t.coefficients[(i + 1) * width + p] =
                wrapped(moved[p] + static_cast<uint64_t>(changes[p][i]));
        t.bounds.push_back(wrapped(static_cast<uint64_t>(t.bounds[i]) + L));
    }
    return t;
}

class Expander {
 public:
    Expander(const Safetensors &file, const Json &document, const Shape &shape)
        : file_(file),
          cells_(document.at("cells").array("cells")),
          shape_(shape),
          shared_(document.at("operators")),
          columns_(columns_of("columns")) {
        const double p = document.at("gru").at("zoneout").real("zoneout");
        if (!(p >= 0 && p <= 1)) throw FileError("Expected zoneout to be in [0, 1]");
        has_zoneout_ = std::rint(p * (1 << 15)) != 0;
        found_.file.metadata = file.metadata;
    }

    Expanded run() {
        read_tables();
        for (size_t i = 0; i < cells_.size(); ++i) {
            const auto D = static_cast<size_t>(shape_.directions);
            suffix_ = "_l" + std::to_string(i / D) + (i % D ? "_reverse" : "");
            inputs_ = i < D ? shape_.input_size : shape_.directions * shape_.hidden_size;
            read_cell(cells_[i], i >= D);
        }
        columns_.finish();
        for (const auto &each : file_.tensors)
            if (!used_.count(each.first))
                throw FileError("Expected no tensor but those of a frozen GRU, got '" +
                                each.first.substr(0, 80) + "'");
        return std::move(found_);
    }

 private:
    const Tensor &bytes(const std::string &name) {
        const auto found = file_.tensors.find(name);
        if (found == file_.tensors.end())
            throw FileError("Expected tensor '" + name + "', got none");
        if (found->second.dtype != Dtype::u8 || found->second.shape.size() != 1)
            throw FileError("Expected tensor '" + name + "' to contain bytes");
        used_.insert(name);
        return found->second;
    }

    ColumnReader columns_of(const std::string &name) {
        const Tensor &tensor = bytes(name);
        return {tensor.data, tensor.count, "'" + name + "'"};
    }

    void add(const std::string &name, std::vector<int64_t> values, std::vector<int64_t> shape) {
        found_.integers.push_back(std::move(values));
        const std::vector<int64_t> &kept = found_.integers.back();
        refer(name, kept, std::move(shape));
    }

    void refer(const std::string &name, const std::vector<int64_t> &kept,
               std::vector<int64_t> shape) {
        found_.file.tensors[name + suffix_] = {Dtype::i64, std::move(shape),
                                               reinterpret_cast<const char *>(kept.data()),
                                               static_cast<int64_t>(kept.size())};
    }

    void add(const std::string &name, std::vector<int64_t> values) {
        const auto size = static_cast<int64_t>(values.size());
        add(name, std::move(values), {size});
    }

    void read_tables() {
        int64_t total = 0;
        for (const Json &cell : cells_) {
            const Json::Array &names = cell.at("tables").array("tables");
            if (names.size() != 3) throw FileError("Expected 3 tables of each cell");
            for (const Json &name : names) {
                const auto known = static_cast<int64_t>(found_.tables.size());
                const int64_t number = name.integer("the number of a table", 0, known);
                if (number == known) found_.tables.push_back(read_table(columns_));
                total +=
                    static_cast<int64_t>(found_.tables[static_cast<size_t>(number)].bounds.size());
                if (total > kMostOfAll)
                    throw FileError("Expected tables of at most " + std::to_string(kMostOfAll) +
                                    " segments in all");
            }
        }
    }

    void read_cell(const Json &cell, bool has_below) {
        const Json *own = cell.find("operators");
        const Widths widths(own && !own->is_null() ? *own : shared_);
        add_quantizers(cell, widths);
        for (size_t i = 0; i < 3; ++i) {
            const auto number =
                cell.at("tables").array("tables")[i].integer("table", 0, kMostOfAll);
            const TableColumns &t = found_.tables[static_cast<size_t>(number)];
            const std::string name = std::string("table.") + kTables[i] + ".";
            const auto count = static_cast<int64_t>(t.bounds.size());
            refer(name + "bounds", t.bounds, {count});
            refer(name + "coefficients", t.coefficients, {count, t.degree + 1});
            refer(name + "numbers", t.numbers, {6});
        }
        const int W = widths.bits[kFirstWeight], R = widths.bits[kFirstWeight + 1];
        found_.weight_bits.push_back({W, R});
        add_codes("W", inputs_, W);
        add_codes("R", shape_.hidden_size, R);
        add_integers(widths, has_below);
    }

    void add_quantizers(const Json &cell, const Widths &widths) {
        int64_t active = 0, pinned = 0;
        for (int i = 0; i < kOperatorCount; ++i)
            active += *kActivationNames[i] && widths.bits[static_cast<size_t>(i)];
        const Json *counts = cell.find("pinned");
        if (counts && !counts->is_null()) {
            if (counts->array("pinned").size() != kWeights)
                throw FileError("Expected 4 numbers of scales of weights");
            for (const Json &each : counts->array("pinned"))
                pinned += each.integer("the number of scales", 0, int64_t{1} << 31);
        }
        const std::vector<int64_t> scales = columns_.column(active + pinned);
        const std::vector<int64_t> points = columns_.column(active);
        const Json *mean = cell.find("exp2_inv");
        if (mean && !mean->is_null()) columns_.column(inputs_);
        size_t at = 0;
        for (size_t i = 0; i < kOperatorCount; ++i) {
            const std::string name = kActivationNames[i];
            if (name.empty() || !widths.bits[i]) continue;
            const QuantizerNumbers q{widths.bits[i], widths.is_unsigned[i] == '0', 1, 0};
            add("quantizer." + name, {q.lo(), q.hi(), points[at]});
            const auto bits = static_cast<uint32_t>(scales[at++]);
            float &scale = found_.reals.emplace_back();
            std::memcpy(&scale, &bits, sizeof scale);
            found_.file.tensors["scale." + name + suffix_] = {
                Dtype::f32, {1}, reinterpret_cast<const char *>(&scale), 1};
        }
    }

    void add_codes(const std::string &name, int64_t K, int bits) {
        const int64_t rows = 3 * shape_.hidden_size;
        if (bits == 8 || bits == 16 || bits == 32) {
            const auto given = file_.tensors.find(name + suffix_);
            if (given == file_.tensors.end())
                throw FileError("Expected tensor '" + name + suffix_ + "', got none");
            used_.insert(name + suffix_);
            found_.file.tensors[name + suffix_] = given->second;
            return;
        }
        const Tensor &tensor = bytes(name + suffix_);
        const auto *data = reinterpret_cast<const unsigned char *>(tensor.data);
        const auto count = static_cast<uint64_t>(rows) * static_cast<uint64_t>(K);
        const uint64_t size = packed_size(count, bits);
        if (static_cast<uint64_t>(tensor.count) != size)
            throw FileError("Expected tensor '" + name + suffix_ + "' to have " +
                            std::to_string(size) + " bytes");
        const Dtype dtype = bits <= 8 ? Dtype::i8 : bits <= 16 ? Dtype::i16 : Dtype::i32;
        found_.codes.emplace_back(count * size_of(dtype));
        char *to = found_.codes.back().data();
        const uint64_t half = uint64_t{1} << (bits - 1);
        for (uint64_t i = 0; i < count; ++i, to += size_of(dtype)) {
            // little-endian, as in files
            uint64_t code = (packed_value(data, i, bits) ^ half) - half;
            for (size_t byte = 0; byte < size_of(dtype); ++byte, code >>= 8)
                to[byte] = static_cast<char>(code);
        }
        found_.file.tensors[name + suffix_] = {
            dtype, {rows, K}, found_.codes.back().data(), static_cast<int64_t>(count)};
    }

    void add_integers(const Widths &widths, bool has_below) {
        const int64_t rows = 3 * shape_.hidden_size;
        const std::string name = "integers" + suffix_;
        ColumnReader reader = columns_of(name);
        for (const char *each : {"Bw", "Br", "Mx", "kx", "Mh", "kh"})
            add(each, reader.column(rows));
        int64_t count = 1 + (has_zoneout_ ? 3 : 0) + (has_below ? 2 * shape_.directions : 0);
        const auto is_present = [&](const std::string &sum) { return widths.of(sum) > 0; };
        for (const auto &[sum, terms] : kSums) count += is_present(sum) ? terms + 1 : 0;
        const std::vector<int64_t> numbers = reader.column(count);
        reader.finish();
        auto next = numbers.begin();
        const auto some = [&next](int64_t n) {
            next += n;
            return std::vector<int64_t>(next - n, next);
        };
        add("cell", {some(1)[0], bias_shift(widths.bits[kFirstWeight], widths.bits[0]),
                     bias_shift(widths.bits[kFirstWeight + 1], widths.bits[1])});
        for (const auto &[sum, terms] : kSums)
            if (is_present(sum)) add(std::string("sum.") + sum, some(terms + 1));
        if (has_zoneout_) add("sum.zoneout", some(3));
        if (has_below) add("between", some(2 * shape_.directions), {shape_.directions, 2});
    }

    const Safetensors &file_;
    const Json::Array &cells_;
    const Shape shape_;
    const Json &shared_;
    std::set<std::string> used_;
    ColumnReader columns_;
    bool has_zoneout_ = false;
    Expanded found_;
    std::string suffix_;
    int64_t inputs_ = 0;
};

}  // namespace

Expanded expanded(const Safetensors &file, const Json &document, const Shape &shape) {
    return Expander(file, document, shape).run();
}

}  // namespace quant_gru
