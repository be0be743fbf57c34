// Runs layers: reads their numbers and inputs, writes their outputs. The instruction set is named
// in the arguments; without one, those that run here are written.
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "cpu/core/layer.hpp"

namespace {

using namespace quant_gru;
using nanobind::cast;
using nanobind::dict;

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

// Writes the kind of the kernel, whether it runs in float32, whether an input was NaN, and the
// outputs: codes, or as many real values.
void run_case(const dict &d, const std::string &variant) {
    const Layer layer(cast<dict>(d["numbers"]), variant);
    Job job;
    job.T = cast<int64_t>(d["T"]);
    job.N = cast<int64_t>(d["N"]);
    job.reverse = cast<bool>(d["reverse"]);
    const int64_t H = layer.H(), C = layer.C();
    const bool real = cast<bool>(d["real"]);
    auto data = [&](const char *name) {
        return reinterpret_cast<void *>(cast<uintptr_t>(d[name]));
    };
    job.x = {data("x"), real, job.N * C, C};
    job.h0 = {data("h0"), real, 0, H};
    if (d.contains("lengths")) job.lengths = static_cast<const int64_t *>(data("lengths"));
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
    const int64_t head[] = {static_cast<int64_t>(layer.kind()), layer.in_float(), nan};
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
            run_case(dict{{static_cast<const char *>(content.data)}}, arguments[1]);
        }
        return 0;
    } catch (const std::exception &error) {
        const std::string text = error.what();
        (void)!write(2, text.data(), text.size());
        return 1;
    }
}
