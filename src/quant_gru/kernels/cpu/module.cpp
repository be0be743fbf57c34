// The Python module: plans are built from a CellPlan's numbers, runs take addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "plan.hpp"
#include "wide.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

struct Aligned {
    explicit Aligned(size_t bytes)
        : data(::operator new(bytes ? bytes : 1, std::align_val_t(64))) {}
    ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
    Aligned(const Aligned &) = delete;
    Aligned &operator=(const Aligned &) = delete;
    void *data;
};

template <class T>
T field(const nb::dict &d, const char *name) {
    return nb::cast<T>(d[name]);
}

Container container_of(const std::string &name) {
    if (name == "int8") return Container::i8;
    if (name == "uint8") return Container::u8;
    if (name == "int16") return Container::i16;
    if (name == "int32") return Container::i32;
    if (name == "int64") return Container::i64;
    throw std::invalid_argument("Expected an integer container, got " + name);
}

using Ints = std::vector<int64_t>;

Sum sum_of(const nb::dict &sums, const char *name) {
    Sum s;
    if (!sums.contains(name)) return s;
    const nb::dict d = nb::cast<nb::dict>(sums[name]);
    const Ints M = field<Ints>(d, "M");
    s.present = 1;
    s.tier = field<std::string>(d, "tier")[0];
    s.k = field<int>(d, "k");
    s.lo = field<int64_t>(d, "lo");
    s.hi = field<int64_t>(d, "hi");
    for (size_t i = 0; i < M.size() && i < 2; ++i) {
        s.M[i] = M[i];
        s.m[i] = std::ldexp(static_cast<double>(M[i]), -s.k);
    }
    return s;
}

const int64_t *address(const nb::dict &d, const char *name) {
    return reinterpret_cast<const int64_t *>(field<uintptr_t>(d, name));
}

class Plan {
 public:
    explicit Plan(const nb::dict &d) {
        H_ = field<int>(d, "H");
        C_ = field<int>(d, "C");
        narrow_ = field<bool>(d, "narrow");
        const nb::dict sums = nb::cast<nb::dict>(d["sums"]);
        fill(narrow_plan_, d, sums);
        fill(wide_plan_, d, sums);
        table(d, "gate.z_out", narrow_plan_.z);
        table(d, "gate.r_out", narrow_plan_.r);
        table(d, "gate.g_out", narrow_plan_.g);
        const nb::dict W = nb::cast<nb::dict>(d["W"]), R = nb::cast<nb::dict>(d["R"]);
        if (!narrow_) {
            wide_plan_.z = narrow_plan_.z;
            wide_plan_.r = narrow_plan_.r;
            wide_plan_.g = narrow_plan_.g;
            keep(W, wide_plan_.W, C_);
            keep(R, wide_plan_.R, H_);
            return;
        }
        int64_t bound = 0;
        pack(W, narrow_plan_.W, C_, bound);
        pack(R, narrow_plan_.R, H_, bound);
        narrow_plan_.h_zero = field<int64_t>(R, "zero");
        narrow_plan_.small_sums = bound < (int64_t{1} << 31) && narrow_plan_.W.planes == 1 &&
                                  narrow_plan_.R.planes == 1 &&
                                  narrow_plan_.W.flush >= narrow_plan_.W.pairs &&
                                  narrow_plan_.R.flush >= narrow_plan_.R.pairs;
        narrow_plan_.in_float = field<bool>(d, "float32") && narrow_plan_.small_sums &&
                                bound < (int64_t{1} << 24) && multipliers_fit_float();
        for (Table *t : {&narrow_plan_.z, &narrow_plan_.r, &narrow_plan_.g}) prepare(*t);
    }

    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;

    bool is_narrow() const { return narrow_; }
    bool in_float() const { return narrow_ && narrow_plan_.in_float; }

    void run(Kernel kernel, uintptr_t x, uintptr_t h0, uintptr_t out, uintptr_t last, int64_t T,
             int64_t N, uintptr_t lengths, bool reverse, int threads) const {
        Job job;
        job.x = reinterpret_cast<const void *>(x);
        job.h0 = reinterpret_cast<const void *>(h0);
        job.out = reinterpret_cast<void *>(out);
        job.last = reinterpret_cast<void *>(last);
        job.lengths = reinterpret_cast<const int64_t *>(lengths);
        job.T = T;
        job.N = N;
        job.reverse = reverse;
        const int parts = parts_of(N, T, threads);
        const int64_t bytes = narrow_ ? workspace_bytes(narrow_plan_) : workspace_bytes(wide_plan_);
        Aligned space(static_cast<size_t>(bytes * parts));
        auto part = [&](int i) {
            Job mine = job;
            mine.first_row = N * i / parts;
            mine.end_row = N * (i + 1) / parts;
            mine.workspace = static_cast<char *>(space.data) + bytes * i;
            if (narrow_)
                kernel(narrow_plan_, mine);
            else
                run_wide(wide_plan_, mine);
        };
        std::vector<std::thread> others;
        others.reserve(static_cast<size_t>(parts));
        int started = 1;
        try {
            for (; started < parts; ++started) others.emplace_back(part, started);
        } catch (const std::system_error &) {
            // no more threads to be had: this one does the rest
        }
        part(0);
        for (int i = started; i < parts; ++i) part(i);
        for (std::thread &other : others) other.join();
    }

 private:
    // Threads pay where each has a few hundred microseconds of work.
    int parts_of(int64_t N, int64_t T, int threads) const {
        const double work = static_cast<double>(N) * static_cast<double>(T) * 3.0 * H_ *
                            (static_cast<double>(H_) + C_ + 64) * (narrow_ ? 1 : 50);
        int parts = threads;
        if (parts > N) parts = static_cast<int>(N);
        if (parts > work / 4e6) parts = static_cast<int>(work / 4e6);
        return parts < 1 ? 1 : parts;
    }

    template <class P>
    void fill(P &p, const nb::dict &d, const nb::dict &sums) {
        p.H = H_;
        p.x_container = container_of(field<std::string>(d, "x_container"));
        p.h_container = container_of(field<std::string>(d, "h_container"));
        p.one = field<int64_t>(d, "one");
        p.z_pre = sum_of(sums, "gate.z_pre");
        p.r_pre = sum_of(sums, "gate.r_pre");
        p.rRh = sum_of(sums, "op.rRh");
        p.g_pre = sum_of(sums, "gate.g_pre");
        p.old_contrib = sum_of(sums, "op.old_contrib");
        p.new_contrib = sum_of(sums, "op.new_contrib");
        p.h = sum_of(sums, "output.h");
    }

    template <class T>
    T *allocate(size_t count) {
        memory_.push_back(std::make_unique<Aligned>(count * sizeof(T)));
        std::memset(memory_.back()->data, 0, count * sizeof(T));
        return static_cast<T *>(memory_.back()->data);
    }

    const int64_t *copy(const int64_t *from, size_t count) {
        int64_t *to = allocate<int64_t>(count);
        std::memcpy(to, from, count * sizeof(int64_t));
        return to;
    }

    void table(const nb::dict &plan, const char *name, Table &t) {
        const nb::dict d = nb::cast<nb::dict>(nb::cast<nb::dict>(plan["tables"])[name]);
        t.segments = field<int>(d, "segments");
        t.degree = field<int>(d, "degree");
        t.shift = field<int>(d, "shift");
        t.segment_shift = field<int>(d, "segment_shift");
        t.last = field<int64_t>(d, "last");
        t.pre_zero = field<int64_t>(d, "pre_zero");
        t.lo = field<int64_t>(d, "lo");
        t.hi = field<int64_t>(d, "hi");
        t.bounds = copy(address(d, "bounds"), t.segments);
        t.coefficients =
            copy(address(d, "coefficients"), static_cast<size_t>(t.segments) * (t.degree + 1));
        t.first = t.bounds[0];
    }

    // Tables in the forms that the narrow kernel reads fast.
    void prepare(Table &t) {
        const int64_t codes = t.last - t.first + 1;
        if (codes <= 4096) {
            float *f = allocate<float>(static_cast<size_t>(codes));
            double *d = allocate<double>(static_cast<size_t>(codes));
            for (int64_t i = 0; i < codes; ++i) {
                d[i] = static_cast<double>(look_up(t, t.first + i - t.pre_zero));
                f[i] = static_cast<float>(d[i]);
            }
            t.direct_float = f;
            t.direct_double = d;
        } else if (t.segment_shift >= 0 && t.degree == 2) {
            const int64_t length = int64_t{1} << t.segment_shift;
            double *c = allocate<double>(3 * static_cast<size_t>(t.segments));
            for (int i = 0; i < t.segments; ++i) {
                double size = 0, power = 1;
                for (int p = 0; p < 3; ++p, power *= static_cast<double>(length)) {
                    const int64_t value = t.coefficients[3 * i + p];
                    c[p * t.segments + i] = static_cast<double>(value);
                    size += std::fabs(static_cast<double>(value)) * power;
                }
                if (size >= 9007199254740992.) return;  // 2^53
            }
            t.scale = std::ldexp(1., -t.shift);
            t.exact_double = c;
        }
    }

    void keep(const nb::dict &d, WideProjection &p, int inputs) {
        const size_t channels = 3 * static_cast<size_t>(H_);
        p.inputs = inputs;
        int32_t *w = allocate<int32_t>(channels * inputs);
        std::memcpy(w, address(d, "codes"), channels * inputs * sizeof(int32_t));
        p.w = w;
        p.bias = copy(address(d, "bias"), channels);
        p.bias_shift = field<int>(d, "bias_shift");
        p.M = copy(address(d, "M"), channels);
        p.k = copy(address(d, "k"), channels);
        p.lo = field<int64_t>(d, "lo");
        p.hi = field<int64_t>(d, "hi");
        p.zero = field<int64_t>(d, "zero");
    }

    void pack(const nb::dict &d, Projection &p, int inputs, int64_t &bound) {
        const int channels = 3 * H_;
        p.inputs = inputs;
        p.pairs = (inputs + 1) / 2;
        p.tiles = (channels + kTile - 1) / kTile;
        const bool wide_weights = field<int>(d, "weight_bits") > 8;
        const bool wide_operand = field<int>(d, "operand_bits") > 8;
        p.planes = wide_weights ? 2 : 1;
        // |product| of a pair: 2^8 (16: a low plane has 9 bits) times 2^8 or 2^15
        p.flush = (wide_weights ? 64 : 128) * (wide_operand ? 1 : 128);
        p.offset = field<int64_t>(d, "offset");
        p.lo = static_cast<double>(field<int64_t>(d, "lo"));
        p.hi = static_cast<double>(field<int64_t>(d, "hi"));
        const int64_t zero = field<int64_t>(d, "zero");
        const int64_t reach = field<int64_t>(d, "reach");  // largest |code - zero point|
        const int32_t *codes = reinterpret_cast<const int32_t *>(address(d, "codes"));
        const int64_t *B = address(d, "bias"), *M = address(d, "M"), *k = address(d, "k");
        const size_t padded = static_cast<size_t>(p.tiles) * kTile;
        const size_t size = padded * 2 * p.pairs;
        int16_t *planes[2] = {allocate<int16_t>(size), nullptr};
        if (p.planes == 2) planes[1] = allocate<int16_t>(size);
        int64_t *bias = allocate<int64_t>(padded);
        double *m = allocate<double>(padded);
        float *m_float = allocate<float>(padded);
        for (int c = 0; c < channels; ++c) {
            const int32_t *row = codes + static_cast<int64_t>(c) * inputs;
            int16_t *to[2];
            const size_t tile = static_cast<size_t>(c / kTile) * p.pairs * 2 * kTile;
            for (int plane = 0; plane < p.planes; ++plane)
                to[plane] = planes[plane] + tile + 2 * (c % kTile);
            int64_t total = 0, magnitude = 0;
            for (int i = 0; i < inputs; ++i) {
                const size_t at = static_cast<size_t>(i / 2) * 2 * kTile + i % 2;
                if (p.planes == 2) {
                    to[0][at] = static_cast<int16_t>(row[i] >> 8);
                    to[1][at] = static_cast<int16_t>(row[i] & 255);
                } else {
                    to[0][at] = static_cast<int16_t>(row[i]);
                }
                total += row[i];
                magnitude += row[i] < 0 ? -static_cast<int64_t>(row[i]) : row[i];
            }
            bias[c] = B[c] + (p.offset - zero) * total;
            // of the true sum, and of the sum before the bias is added
            const int64_t shifted = reach + (p.offset > zero ? p.offset - zero : zero - p.offset);
            const int64_t most = magnitude * shifted + (B[c] < 0 ? -B[c] : B[c]) +
                                 (bias[c] < 0 ? -bias[c] : bias[c]);
            bound = most > bound ? most : bound;
            m[c] = std::ldexp(static_cast<double>(M[c]), static_cast<int>(-k[c]));
            m_float[c] = static_cast<float>(m[c]);
        }
        p.w[0] = planes[0];
        p.w[1] = planes[1];
        p.bias = bias;
        p.m = m;
        p.m_float = m_float;
    }

    bool multipliers_fit_float() const {
        auto fits = [](double m) { return m == 0 || (m > 1e-20 && m < 1e20); };
        bool ok = true;
        for (const Projection *p : {&narrow_plan_.W, &narrow_plan_.R})
            for (int c = 0; c < 3 * H_; ++c) ok = ok && fits(p->m[c]);
        const NarrowPlan &n = narrow_plan_;
        for (const Sum *s :
             {&n.z_pre, &n.r_pre, &n.rRh, &n.g_pre, &n.old_contrib, &n.new_contrib, &n.h})
            ok = ok && fits(s->m[0]) && fits(s->m[1]);
        return ok;
    }

    int H_ = 0, C_ = 0;
    bool narrow_ = true;
    NarrowPlan narrow_plan_;
    WidePlan wide_plan_;
    std::vector<std::unique_ptr<Aligned>> memory_;
};

struct Variant {
    const char *name;
    Kernel kernel;
    Quantize quantize;
    Dequantize dequantize;
    bool (*runs)();
};

bool always() { return true; }
#if defined(QG_X86)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

// Fastest first.
const Variant kVariants[] = {
#if defined(QG_X86)
    {"avx512-vnni", avx512::run, avx512::quantize, avx512::dequantize, has_avx512},
    {"avx2", avx2::run, avx2::quantize, avx2::dequantize, has_avx2},
#endif
    {"portable", portable::run, portable::quantize, portable::dequantize, always},
};

std::vector<std::string> variants(bool only_runnable) {
    std::vector<std::string> names;
    for (const Variant &v : kVariants)
        if (!only_runnable || v.runs()) names.emplace_back(v.name);
    return names;
}

const Variant &variant_of(const std::string &name) {
    for (const Variant &v : kVariants)
        if (name == v.name && v.runs()) return v;
    throw std::invalid_argument("Expected an instruction set that runs here, got " + name);
}

void run(const Plan &plan, const std::string &variant, uintptr_t x, uintptr_t h0, uintptr_t out,
         uintptr_t last, int64_t T, int64_t N, uintptr_t lengths, bool reverse, int threads) {
    const Variant &v = variant_of(variant);
    nb::gil_scoped_release release;
    plan.run(v.kernel, x, h0, out, last, T, N, lengths, reverse, threads);
}

Border border_of(double scale, int64_t zero, int64_t lo, int64_t hi, const std::string &container,
                 int64_t count) {
    Border b;
    b.scale = static_cast<float>(scale);
    b.zero = static_cast<int32_t>(zero);
    b.lo = static_cast<int32_t>(lo - zero);
    b.hi = static_cast<int32_t>(hi - zero);
    b.container = container_of(container);
    b.count = count;
    return b;
}

bool quantize(const std::string &variant, double scale, int64_t zero, int64_t lo, int64_t hi,
              const std::string &container, int64_t count, uintptr_t x, uintptr_t codes) {
    return variant_of(variant).quantize(border_of(scale, zero, lo, hi, container, count),
                                        reinterpret_cast<const float *>(x),
                                        reinterpret_cast<void *>(codes));
}

void dequantize(const std::string &variant, double scale, int64_t zero, int64_t lo, int64_t hi,
                const std::string &container, int64_t count, uintptr_t codes, uintptr_t x) {
    variant_of(variant).dequantize(border_of(scale, zero, lo, hi, container, count),
                                   reinterpret_cast<const void *>(codes),
                                   reinterpret_cast<float *>(x));
}

}  // namespace

int64_t workspace_bytes(const NarrowPlan &p) {
    constexpr int64_t steps = 8, spare = 64 * 8;
    const int64_t wx = steps * kRows * static_cast<int64_t>(p.W.tiles) * kTile * 8;
    const int64_t rh = kRows * static_cast<int64_t>(p.R.tiles) * kTile * 8;
    const int64_t h = static_cast<int64_t>(kRows) * p.H * 8, t = static_cast<int64_t>(p.H) * 6 * 8;
    const int64_t operands =
        (steps * kRows * p.W.pairs + kRows * static_cast<int64_t>(p.R.pairs)) * 4;
    return (wx + rh + h + t + operands + spare + 63) / 64 * 64;
}

}  // namespace quant_gru

NB_MODULE(_native, m) {
    using namespace quant_gru;
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<const nb::dict &>())
        .def_prop_ro("narrow", &Plan::is_narrow)
        .def_prop_ro("float32", &Plan::in_float);
    m.def("variants", &variants, nb::arg("only_runnable") = true);
    m.def("run", &run);
    m.def("quantize", &quantize);
    m.def("dequantize", &dequantize);
}
