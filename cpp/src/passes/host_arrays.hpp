// Arrays in memory of a GPU as arrays of the host.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "passes/code_layer.hpp"
#include "passes/sizes.hpp"

namespace quant_gru {

// Copies on the host of arrays that are in memory of a GPU; other arrays stay where they are.
class HostArrays {
 public:
    // Work of the CUDA stream is waited for before the first copy.
    explicit HostArrays(void *stream);
    ~HostArrays();
    HostArrays(const HostArrays &) = delete;
    HostArrays &operator=(const HostArrays &) = delete;

    // Replaces an array, which may be null, by one of the host. Throws DeviceError.
    template <class V>
    void read(const V *&array, int64_t count) {
        array = static_cast<const V *>(on_host(array, bytes_of_array<V>(count), false));
    }

    // The same for an array that is written: `finish` copies it back.
    template <class V>
    void change(V *&array, int64_t count) {
        array = static_cast<V *>(on_host(array, bytes_of_array<V>(count), true));
    }

    template <class T>
    void read(CodeArguments<T> &arguments, const PassSizes &sizes) {
        const int64_t C = sizes.C, H = sizes.H;
        read(arguments.W, 3 * H * C);
        read(arguments.R, 3 * H * H);
        read(arguments.bx, 3 * H);
        read(arguments.br, 3 * H);
        read(arguments.scale, code_scales(H));
        read(arguments.zero_point, kCodeOperators);
    }

    // Copies back what was written, and waits until it is there. Throws DeviceError.
    void finish();

 private:
    struct Copy;

    template <class V>
    static size_t bytes_of_array(int64_t count) {
        return static_cast<size_t>(count) * sizeof(V);
    }

    void *on_host(const void *array, size_t bytes, bool back);

    void *stream_;
    std::vector<std::unique_ptr<Copy>> copies_;
};

}  // namespace quant_gru
