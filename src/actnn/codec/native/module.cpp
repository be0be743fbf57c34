// The Python module: tensors come as addresses or as torch's tensors.
#include <nanobind/nanobind.h>

#include "actnn/codec/native/calls.hpp"

namespace nb = nanobind;
using namespace actnn;

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // what threads use when the interpreter exits
    nb::class_<Call>(m, "Call")
        .def("__init__",
             [](Call *self, bool encodes, int real, int64_t bits, int64_t group, bool stochastic,
                int64_t rows, int64_t m, float lowest, float highest, nb::object threads,
                const nb::handle &type) {
                 new (self) Call(encodes ? encode : decode, static_cast<Real>(real), bits, group,
                                 stochastic, rows, m, lowest, highest, std::move(threads), type);
             })
        .def("__call__", &Call::start, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg());
    nb::class_<Coder>(m, "Coder")
        .def(nb::init<int64_t, nb::object, nb::object, int64_t, nb::object, nb::object, nb::object,
                      nb::object, const nb::handle &>())
        .def("encode", &Coder::encode)
        .def("decode", &Coder::decode);
    m.def("use_only_portable", [](bool only) { only_portable = only; });
}
