// Runs layers: reads their plans and inputs, writes their outputs. The instruction set is named in
// the arguments; without one, those that run here are written. layer_program.py writes what this
// reads: words of 8 bytes, and arrays, each after its size in bytes.
#include <unistd.h>

#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>

#include "cpu/core/cell_numbers.hpp"
#include "cpu/core/layer.hpp"
#include "cpu/core/memory.hpp"
#include "cpu/core/tasks.hpp"

namespace {

using namespace quant_gru;

void read_all(void *to, size_t bytes) {
    for (char *at = static_cast<char *>(to); bytes;) {
        const ssize_t n = read(0, at, bytes);
        if (n <= 0) throw std::runtime_error("no more to read");
        at += n;
        bytes -= static_cast<size_t>(n);
    }
}

void write_all(const void *from, size_t bytes) {
    for (const char *at = static_cast<const char *>(from); bytes;) {
        const ssize_t n = write(1, at, bytes);
        if (n <= 0) throw std::runtime_error("nowhere to write");
        at += n;
        bytes -= static_cast<size_t>(n);
    }
}

size_t size_of(Container c) {
    return c == Container::i8 || c == Container::u8 ? 1 : c == Container::i16 ? 2 : 4;
}

// Reads a case in the order it was written.
struct Reader {
    const char *at;

    template <class T>
    T word() {
        T value;
        static_assert(sizeof value == 8, "words have 8 bytes");
        std::memcpy(&value, at, sizeof value);
        at += sizeof value;
        return value;
    }
    template <class T>
    void read(T &value) {
        value = static_cast<T>(word<int64_t>());
    }
    void read(double &value) { value = word<double>(); }
    template <class T, class... Others>
    void read(T &value, Others &...others) {
        read(value);
        read(others...);
    }
    // Arrays without content are null.
    template <class T>
    void array(const T *&to) {
        const auto bytes = word<int64_t>();
        to = bytes ? reinterpret_cast<const T *>(at) : nullptr;
        at += (bytes + 7) / 8 * 8;
    }
    void array(const void *&to) {
        const char *bytes;
        array(bytes);
        to = bytes;
    }
};

void read(Reader &from, QuantizerNumbers &q) {
    double scale;
    from.read(q.bits, q.is_signed, scale, q.zero);
    q.scale = static_cast<float>(scale);
}

void read(Reader &from, SumNumbers &s) { from.read(s.terms, s.k, s.M[0], s.M[1]); }

void read(Reader &from, TableNumbers &t) {
    from.read(t.segments, t.degree, t.shift, t.segment_shift, t.last, t.zero, t.lo, t.hi);
    from.array(t.bounds);
    from.array(t.coefficients);
}

void read(Reader &from, MatrixNumbers &m) {
    from.read(m.kind, m.inputs, m.weight_bits);
    from.array(m.codes);
    from.array(m.bias);
    from.array(m.M);
    from.array(m.k);
}

void read(Reader &from, CellNumbers &n) {
    from.read(n.H, n.one);
    for (QuantizerNumbers *each : {&n.x, &n.h, &n.Wx, &n.Rh, &n.z_pre, &n.z, &n.r_pre, &n.r,
                                   &n.g_pre, &n.g, &n.rRh, &n.old_contrib, &n.new_contrib})
        read(from, *each);
    for (SumNumbers *each : {&n.sums.z_pre, &n.sums.r_pre, &n.sums.rRh, &n.sums.g_pre,
                             &n.sums.old_contrib, &n.sums.new_contrib, &n.sums.h, &n.sums.zoneout})
        read(from, *each);
    for (TableNumbers *each : {&n.tables.z, &n.tables.r, &n.tables.g}) read(from, *each);
    read(from, n.W);
    read(from, n.R);
}

// Writes the kind of the kernel, whether it runs in float32, whether an input was NaN, the bits
// that a weight of W and of R takes in the fused kernel, and the outputs: codes, or as many real
// values.
void run_case(Reader from, const std::string &variant) {
    CellNumbers numbers;
    read(from, numbers);
    const Layer layer(layer_plan(numbers), variant);
    Job job;
    bool real;
    from.read(job.T, job.N, job.reverse, real);
    from.array(job.x.data);
    from.array(job.h0.data);
    from.array(job.lengths);
    const int64_t H = layer.H(), C = layer.C();
    job.x.real = job.h0.real = real;
    job.x.step = job.N * C;
    job.x.row = C;
    job.h0.row = H;
    const size_t element = real ? 4 : size_of(layer.h().container);
    Aligned out(static_cast<size_t>(job.T * job.N * H) * element);
    Aligned last(static_cast<size_t>(job.N * H) * element);
    if (real) {
        job.out.real = static_cast<float *>(out.data);
        job.last.real = static_cast<float *>(last.data);
    } else {
        job.out.codes = out.data;
        job.last.codes = last.data;
    }
    job.out.codes_step = job.out.real_step = job.N * H;
    job.out.codes_row = job.out.real_row = job.last.codes_row = job.last.real_row = H;
    Scratch scratch;
    const bool nan = run_tasks({{&layer, job}}, 1, scratch);
    const int64_t head[] = {static_cast<int64_t>(layer.kind()), layer.in_float(), nan,
                            layer.fused().W.bits, layer.fused().R.bits};
    write_all(head, sizeof head);
    write_all(out.data, static_cast<size_t>(job.T * job.N * H) * element);
    write_all(last.data, static_cast<size_t>(job.N * H) * element);
}

}  // namespace

int main(int count, char **arguments) {
    try {
        if (count < 2) {
            for (const std::string &name : variants(true))
                write_all((name + "\n").data(), name.size() + 1);
            return 0;
        }
        int64_t cases;
        read_all(&cases, sizeof cases);
        for (; cases; --cases) {
            int64_t size;
            read_all(&size, sizeof size);
            Aligned content(static_cast<size_t>(size));
            read_all(content.data, static_cast<size_t>(size));
            run_case({static_cast<const char *>(content.data)}, arguments[1]);
        }
        return 0;
    } catch (const std::exception &error) {
        const std::string text = error.what();
        (void)!write(2, text.data(), text.size());
        return 1;
    }
}
