#include "bindings/effects.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "cpu/calibration/effects.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

Codes codes_of(const nb::dict &d) {
    const auto number = [&](const char *name) { return nb::cast<double>(d[name]); };
    Codes codes;
    codes.lo = number("lo");
    codes.hi = number("hi");
    codes.symmetric = nb::cast<bool>(d["symmetric"]);
    codes.free_scale = nb::cast<bool>(d["free"]);
    codes.low = number("low");
    codes.high = number("high");
    codes.covering = number("covering");
    return codes;
}

}  // namespace

void bind_effects(nb::module_ &m) {
    nb::class_<Effects>(m, "Effects")
        .def("__init__",
             [](Effects *self, int64_t H, std::vector<int64_t> batch_sizes, bool reverse,
                uintptr_t Wx, uintptr_t Rh, uintptr_t before) {
                 const auto reals = [](uintptr_t at) {
                     return reinterpret_cast<const float *>(at);
                 };
                 new (self) Effects(
                     {H, std::move(batch_sizes), reverse, reals(Wx), reals(Rh), reals(before)});
             })
        .def("choose",
             [](Effects &self, int op, const nb::dict &codes) {
                 const Codes given = codes_of(codes);
                 nb::gil_scoped_release release;
                 const Choice found = self.choose(static_cast<Quantized>(op), given);
                 return std::tuple(found.found, found.scale, found.zero_point);
             })
        .def("effect", [](Effects &self, int op, const nb::dict &codes, double scale,
                          double zero_point, double stretch) {
            const Codes given = codes_of(codes);
            nb::gil_scoped_release release;
            return self.effect(static_cast<Quantized>(op), given, scale, zero_point, stretch);
        });
}

}  // namespace quant_gru
