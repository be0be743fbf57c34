// The Python module: tensors come as addresses.
#include <nanobind/nanobind.h>

#include "actnn/codec/native/codec.hpp"

namespace nb = nanobind;

namespace {

template <void (*run)(const actnn::Codec &, int)>
void call(uintptr_t x, uintptr_t data, uintptr_t params, uintptr_t bits, uintptr_t ends,
          int64_t rows, int64_t m, int64_t group, int64_t capacity, uint64_t seed, uint32_t step,
          uint32_t tensor, int real, bool stochastic, float lowest, float highest, int threads) {
    const actnn::Codec codec{reinterpret_cast<void *>(x),
                             reinterpret_cast<uint8_t *>(data),
                             reinterpret_cast<uint32_t *>(params),
                             reinterpret_cast<const int64_t *>(bits),
                             reinterpret_cast<const int64_t *>(ends),
                             rows,
                             m,
                             group,
                             capacity,
                             seed,
                             step,
                             tensor,
                             static_cast<actnn::Real>(real),
                             stochastic,
                             lowest,
                             highest};
    nb::gil_scoped_release release;
    run(codec, threads);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("encode", &call<actnn::encode>);
    m.def("decode", &call<actnn::decode>);
    m.def("use_only_portable", [](bool only) { actnn::only_portable = only; });
}
