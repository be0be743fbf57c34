"""The constants of saturating.cuh: gates in fractions of 256, and the check that they are exact."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from quant_gru.integer.plan import FrozenPart
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels.cuda.structs import BeforeC, LimitsC, SaturatedC

CODES = 256  # a fraction is (code - smallest code) / CODES
ENTRIES = CODES + 1  # per table: sums are clamped to [0, 1], both ends included
_ROUNDING = 49152.0  # see saturating.cuh
_EXACT = 1 << 24  # float32 represents every multiple of a unit up to this multiple
_SMALLEST, _LARGEST = Fraction(1, 1 << 60), 1 << 60  # exclusive limits of multipliers


def first_entry(pre: Quantizer) -> int:
    """Return the smallest zero-point-free code, rounded down to even: a table's first entry."""
    lo = pre.lo - pre.zero_point
    return lo - lo % 2


def saturated_numbers(frozen: FrozenPart) -> Any:
    """Return the SaturatedC of a plan, or None if the arithmetic would not be exact.

    It is exact if the codes have at most 8 bits, all multipliers are powers of two, and the sums
    have few fraction bits.
    """
    q, sums = frozen.quantizers, frozen.sums
    powers: dict[str, list[Fraction]] = {}
    for name, each in sums.items():
        found = [_power(each, M) for M in each.multipliers]
        powers[name] = [m for m in found if m is not None]
        if len(powers[name]) < len(found):
            return None
    if any(q[name].hi - q[name].lo >= CODES for name in _LIMITED & q.keys()):
        return None
    exact = True

    def check(unit: Fraction, *largest: Fraction | int) -> None:
        nonlocal exact
        total = sum((abs(Fraction(each)) for each in largest), Fraction(CODES))
        exact &= total / unit <= _EXACT

    def limits(name: str) -> Any:
        if name not in q:
            return LimitsC()
        lo, hi = _range_of(q[name])
        return LimitsC(-_ROUNDING - lo / CODES, (hi - lo) / CODES)

    c: Any = SaturatedC()
    Rh, rRh = q["matmul.Rh"], q.get("op.rRh")
    c.Rh, c.rRh = limits("matmul.Rh"), limits("op.rRh")
    c.old_contrib, c.new_contrib = limits("op.old_contrib"), limits("op.new_contrib")
    for gate in "zrg":
        name = f"gate.{gate}_pre"
        early, late = powers[name]
        # lo is the code whose fraction is 0 in the late term; an unrounded product has no fraction
        shared = rRh if gate == "g" else Rh
        lo = _range_of(shared)[0] if shared else 0
        offset = late * lo - first_entry(q[name])
        setattr(c, gate, BeforeC(early / CODES, late, offset / CODES))
        unit = min(early, late, Fraction(1))
        check(unit, early * q["matmul.Wx"].max_abs, late * lo, first_entry(q[name]))
    # the factor of the reset gate
    rest = powers["op.rRh"][0] if rRh else powers["gate.g_pre"][1]
    c.rest, c.rest_offset = rest, rest * _range_of(Rh)[0] / CODES
    to_old, to_new = powers["output.h"]
    unit, offset, largest = min(to_old, to_new), Fraction(0), Fraction(0)
    terms: list[tuple[str, Fraction, str, int]] = [
        ("op.old_contrib", to_old, "of_z", q["gate.z_out"].max_abs * q["output.h"].max_abs),
        ("op.new_contrib", to_new, "of_left", frozen.one_minus_z * q["gate.g_out"].max_abs),
    ]
    for name, m, factor, product in terms:
        if name in q:
            offset += m * _range_of(q[name])[0]
            setattr(c, factor, powers[name][0] / CODES)
        else:
            setattr(c, factor, m)
        largest += m * (q[name].max_abs if name in q else product)
    c.h_old, c.h_new, c.h_offset = to_old * CODES, to_new * CODES, offset
    check(unit, largest, offset)
    return c if exact else None


_LIMITED = {
    "matmul.Rh",
    "gate.z_pre",
    "gate.r_pre",
    "gate.g_pre",
    "op.rRh",
    "op.old_contrib",
    "op.new_contrib",
}


def _range_of(q: Quantizer) -> tuple[int, int]:
    return q.lo - q.zero_point, q.hi - q.zero_point


def _power(each: WeightedSum, M: Any) -> Fraction | None:
    """Return the multiplier if it is a power of two well within float32's range, otherwise None."""
    M = int(M)
    m = Fraction(M) / Fraction(2) ** int(each.shift)
    return m if M > 0 and M & (M - 1) == 0 and _SMALLEST < m < _LARGEST else None
