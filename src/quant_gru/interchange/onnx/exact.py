"""Exact integer arithmetic in ONNX: float32 up to 2^24, float64 up to 2^53, int64 beyond.

A value is a code less its zero point, carried in float32 if all sums of a cell fit it, otherwise in
float64, which holds every code of up to 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.rounding import DEFAULT
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.interchange.onnx.builder import Builder, Value

FLOAT32, FLOAT64, INT64 = 1 << 24, 1 << 53, 1 << 62
LIMITS = {"FLOAT": FLOAT32, "DOUBLE": FLOAT64}
FLOATS = {"FLOAT": np.float32, "DOUBLE": np.float64}
_SATURATES_LOG2 = 34
_CAST = 40  # bytes that a Cast and its names take in a file
_NORMAL = 100  # shifts by which codes neither overflow float32 nor become subnormal

Objects = NDArray[np.object_]


@dataclass(frozen=True)
class Term:
    """A term of a weighted sum: one value, or two whose product it is.

    Attributes:
        factors: One or two values, integers times `unit` in all.
        bound: The largest magnitude of the integers, of all channels or of each.
        unit: What the values are multiples of, of all channels or of each.
    """

    factors: tuple[Value, ...]
    bound: Any
    unit: float | NDArray[np.float64] = 1.0

    def times(self, other: Term) -> Term:
        """Return the product of two terms of one value each."""
        factors = (*self.factors, *other.factors)
        return Term(factors, self.bound * other.bound, self.unit * other.unit)


@dataclass(frozen=True)
class Rule:
    """sum of M_i * v_i / 2^k, rounded and clamped; all () or of the shape of the channels.

    Attributes:
        Ms: Multipliers, Python integers.
        k: Shift.
        lo: Smallest result less its zero point.
        hi: Largest result less its zero point.
        rounding: How the sum is rounded.
    """

    Ms: tuple[Objects, ...]
    k: NDArray[np.int64]
    lo: NDArray[np.float64]
    hi: NDArray[np.float64]
    rounding: str = DEFAULT

    @property
    def left(self) -> NDArray[np.int64]:
        """Shifts that remain after the first step of ``double``."""
        bits = np.maximum.reduce([np.asarray(_bits(M), np.int64) for M in self.Ms])
        found: NDArray[np.int64] = np.maximum(self.k - bits, 0)
        return found

    def bound(self, bounds: Sequence[Any]) -> int:
        """Return the largest sum of M_i * v_i, in the coarsest unit that has all of them."""
        shifts = reduce(np.minimum, (np.asarray(_zeros(M), object) for M in self.Ms))
        total = sum(M * bound for M, bound in zip(self.Ms, bounds, strict=True))
        return int(np.max(np.asarray(total, object) >> shifts))

    def fits(self, bounds: Sequence[Any], dtype: str) -> bool:
        """Return whether a float type has all sums exactly."""
        normal = dtype != "FLOAT" or int(np.abs(self.k).max()) <= _NORMAL
        return normal and self.bound(bounds) < LIMITS[dtype]

    def factor(self, index: int) -> NDArray[np.float64]:
        """Return M_i / 2^k."""
        return np.ldexp(self.Ms[index].astype(np.float64), -self.k)

    def limited(self, lo: int, hi: int) -> Rule:
        """Return the rule with results that are clamped to [lo, hi], too."""
        return replace(self, lo=np.clip(self.lo, lo, hi), hi=np.clip(self.hi, lo, hi))


_zeros = np.frompyfunc(lambda M: (M & -M).bit_length() - 1 if M else 1 << 10, 1, 1)
"""How often 2 divides integers."""
_bits = np.frompyfunc(int.bit_length, 1, 1)


def rule_of(total: WeightedSum) -> Rule:
    """Return the rule of a weighted sum of a plan."""

    def numbers(value: Any, dtype: Any) -> Any:
        return np.array(value.tolist() if isinstance(value, Tensor) else value, dtype)

    lo, hi = total.lo - total.zero_point, total.hi - total.zero_point
    Ms = tuple(numbers(M, object) for M in total.multipliers)
    least, most = (np.array(v, np.float64) for v in (lo, hi))
    return Rule(Ms, numbers(total.shift, np.int64), least, most, total.rounding)


def beside(rules: Sequence[Rule], sizes: Sequence[int]) -> Rule:
    """Return the rule of the channels of rules side by side, `sizes` of them each."""

    def joined(parts: Sequence[Any]) -> Any:
        scalar = all(part.ndim == 0 and part == parts[0] for part in parts)
        wide = [np.broadcast_to(part, size) for part, size in zip(parts, sizes, strict=True)]
        return parts[0] if scalar else np.concatenate(wide)

    Ms = tuple(joined(parts) for parts in zip(*(rule.Ms for rule in rules), strict=True))
    rest = ([getattr(rule, name) for rule in rules] for name in ("k", "lo", "hi"))
    k, lo, hi = map(joined, rest)
    return Rule(Ms, k, lo, hi, rules[0].rounding)


def weighted_sum(b: Builder, name: str, rule: Rule, terms: Sequence[Term], dtype: str) -> Value:
    """Return the result of a weighted sum less its zero point.

    Args:
        b: The builder.
        name: The operator, for messages.
        rule: Multipliers, shift and limits.
        terms: The terms.
        dtype: 'FLOAT' or 'DOUBLE', of the terms and of the result.

    Raises:
        QuantGRUError: The sum does not fit 64 bits.
    """
    bounds = [term.bound for term in terms]
    inner = dtype if rule.fits(bounds, dtype) else "DOUBLE"
    terms = [replace(term, factors=converted(b, term.factors, dtype, inner)) for term in terms]
    if rule.fits(bounds, inner):
        factors = [rule.factor(index) / term.unit for index, term in enumerate(terms)]
        parts = [b.op("Mul", *t.factors) if len(t.factors) == 2 else t.factors[0] for t in terms]
        if all(np.array_equal(factor, factors[0]) for factor in factors):
            found = scaled(b, _added(b, parts), factors[0], inner)
        else:
            pairs = zip(parts, factors, strict=True)
            found = _added(b, [scaled(b, v, factor, inner) for v, factor in pairs])
        if np.all(rule.k == 0):
            largest = sum(M * bound for M, bound in zip(rule.Ms, bounds, strict=True))
            if np.all(rule.lo <= -largest) and np.all(rule.hi >= largest):
                return converted(b, (found,), inner, dtype)[0]
        else:
            found = rounded_quotient(b, found, rule, inner)
    else:
        parts = []
        for term in terms:
            assert np.all(term.unit == 1)
            fitting(name, term.bound)
            wide = [b.cast(v, "INT64") for v in term.factors]
            parts.append(b.op("Mul", *wide) if len(wide) == 2 else wide[0])
        objects = [np.array(bound, object) for bound in bounds]
        found = summed(b, name, parts, rule, objects)
    return converted(b, (clipped(b, found, rule.lo, rule.hi, inner),), inner, dtype)[0]


def nearest(b: Builder, v: Value, rounding: str, dtype: str) -> Value:
    """Return real values of type 'FLOAT' or 'DOUBLE' rounded by any rule but ``double``."""
    if rounding == "half_even":
        return b.op("Round", v)
    if rounding == "floor":
        return b.op("Floor", v)
    size = b.op("Abs", v) if rounding == "half_away" else v
    below = b.op("Floor", size)
    # unlike a sum with 0.5, the difference is exact where it is near 0.5
    up = b.op("GreaterOrEqual", b.op("Sub", size, below), number(b, 0.5, dtype))
    found = b.op("Add", below, b.cast(up, dtype))
    return b.op("Mul", found, b.op("Sign", v)) if rounding == "half_away" else found


def rounded_quotient(b: Builder, v: Value, rule: Rule, dtype: str) -> Value:
    """Return exact sums, already divided by 2^k, rounded by a rule."""
    if rule.rounding != "double":
        return nearest(b, v, rule.rounding, dtype)
    left = rule.left
    v = nearest(b, scaled(b, v, np.ldexp(1.0, left), dtype), "half_up", dtype)
    if not left.any():
        return v
    return nearest(b, scaled(b, v, np.ldexp(1.0, -left), dtype), "half_away", dtype)


def converted(b: Builder, values: Sequence[Value], dtype: str, wanted: str) -> tuple[Value, ...]:
    """Return values of one type in another."""
    return tuple(values) if dtype == wanted else tuple(b.cast(v, wanted) for v in values)


def number(b: Builder, value: Any, dtype: str) -> Value:
    """Return a constant of type 'FLOAT' or 'DOUBLE', which a file has in a smaller one."""
    kind = FLOATS[dtype]
    array = np.asarray(value, kind)
    if array.nbytes > _CAST and np.all(np.isfinite(array)):
        if np.all(array == np.rint(array)) and np.abs(array).max() < 1 << 31:
            return stored(b, array.astype(np.int64), dtype)
        gain = array.nbytes - 4 * array.size
        if gain > _CAST and np.all(array == array.astype(np.float32)):
            return b.cast(b.float32(array), dtype)
    return b.constant(array, kind)


def scaled(b: Builder, v: Value, factor: NDArray[np.float64], dtype: str) -> Value:
    """Return v * factor, which is exact in `dtype`."""
    return v if np.all(factor == 1) else b.op("Mul", v, number(b, factor, dtype))


def _added(b: Builder, parts: Sequence[Value]) -> Value:
    return b.op("Add", *parts) if len(parts) == 2 else parts[0]


def clipped(b: Builder, v: Value, lo: Any, hi: Any, dtype: str) -> Value:
    """Return v within limits, () or of the channels."""
    least, most = (number(b, each, dtype) for each in (lo, hi))
    if np.ndim(lo) or np.ndim(hi):  # Clip has scalars alone
        return b.op("Min", b.op("Max", v, least), most)
    return b.op("Clip", v, least, most)


def fitting(name: str, bound: int) -> int:
    """Return a bound that 64-bit integers hold.

    Raises:
        QuantGRUError: They do not.
    """
    if bound >= INT64:
        raise QuantGRUError(
            f"Expected sums below 2^62 for ONNX's 64-bit integers, got one of "
            f"{bound.bit_length()} bits (operator {name!r}); make its operands narrower"
        )
    return bound


def summed(
    b: Builder,
    name: str,
    terms: Sequence[Value],
    rule: Rule,
    bounds: Sequence[Objects],
) -> Value:
    """Return the rounded sum of M_i * v_i / 2^k of int64 as float64, for sums of any size.

    A sum beyond 62 bits is split: with M = M' * 2^s + M'', the upper part is A + floor(B / 2^s) for
    A = sum M' * v and B = sum M'' * v, and what B leaves decides ties alone.

    Args:
        b: The builder.
        name: The operator, for messages.
        terms: v_i, int64.
        rule: Multipliers and shifts.
        bounds: The largest magnitude of each v_i, Python integers () or (channels,).

    Raises:
        QuantGRUError: Neither way fits.
    """
    Ms, k = rule.Ms, rule.k

    def dot(factors: Sequence[Objects]) -> Value:
        pairs = zip(terms, factors, strict=True)
        return _added(b, [b.op("Mul", v, b.int64(M)) for v, M in pairs])

    def largest(factors: Sequence[Objects]) -> Any:
        return sum(M * bound for M, bound in zip(factors, bounds, strict=True))

    most = int(np.max(largest(Ms)))
    if most < INT64:
        return rounded(b, name, dot(Ms), largest(Ms), k, rule.rounding, rule.left)
    s = most.bit_length() - 61
    upper, lower = [M >> s for M in Ms], [M & ((1 << s) - 1) for M in Ms]
    if int(np.min(k - rule.left)) <= s or int(np.max(largest(lower))) >= INT64:
        fitting(name, most)
    low, unit = dot(lower), b.int64(1 << s)
    rest = b.op("Mod", low, unit)
    total = b.op("Add", dot(upper), b.op("Div", b.op("Sub", low, rest), unit))
    bound = np.asarray(largest(Ms), object) // (1 << s) + 2
    more = b.op("Greater", rest, b.int64(0))
    return rounded(b, name, total, bound, k - s, rule.rounding, rule.left, more)


def rounded(
    b: Builder,
    name: str,
    total: Value,
    bound: Any,
    k: Any,
    rounding: str,
    left: Any = 0,
    more: Value | None = None,
) -> Value:
    """Return total / 2^k of int64, rounded, as float64, which is exact below 2^53.

    Limits are applied to the float64: ONNX Runtime 1.23 has Clip, Min and Max of int64 wrong.

    Args:
        b: The builder.
        name: The operator, for messages.
        total: int64.
        bound: The largest magnitude of `total`, Python integers, of the shape of k.
        k: Shifts, integers () or (channels,).
        rounding: The rule.
        left: Shifts of the second step of ``double``, of the shape of k.
        more: bool, True where a fraction of 1 is to be added to `total`; then k > left.
    """
    if rounding == "double":
        first = np.asarray(k - left)
        total = _shifted(b, name, total, bound, first, "half_up", more)
        bound = np.asarray(bound, object) // (1 << np.maximum(first, 0).astype(object)) + 1
        k, rounding, more = np.where(np.asarray(k) < 0, k, left), "half_away", None
    found = b.cast(_shifted(b, name, total, bound, k, rounding, more), "DOUBLE")
    up = np.clip(-np.asarray(k), 0, _SATURATES_LOG2)
    return b.op("Mul", found, b.float64(np.ldexp(1.0, up))) if up.any() else found


def _shifted(
    b: Builder, name: str, total: Value, bound: Any, k: Any, rounding: str, more: Value | None
) -> Value:
    """Return total / 2^k of int64, rounded by a rule of one step; total itself where k < 0."""
    k, bound = np.broadcast_arrays(np.asarray(k, np.int64), np.asarray(bound, object))
    vanishes = np.array(
        [s > 0 and v < 1 << (int(s) - 1) for s, v in zip(k.flat, bound.flat, strict=True)]
    ).reshape(k.shape)
    for v in bound.flat:
        fitting(name, int(v))
    if rounding == "floor":
        vanishes = np.zeros_like(vanishes)
    right = np.where(vanishes, 0, np.clip(k, 0, 62))
    divisor = b.int64(np.left_shift(np.ones_like(right), right))
    half = b.int64(np.left_shift(np.ones_like(right), np.maximum(right - 1, 0)))
    if vanishes.any():
        total = b.op("Mul", total, b.int64(np.where(vanishes, 0, 1)))
    rest = b.op("Mod", total, divisor)
    quotient = b.op("Div", b.op("Sub", total, rest), divisor)
    if rounding == "floor":
        return quotient
    if rounding == "half_up":
        # without a shift, rest and half are 0 and 1
        return b.op("Add", quotient, b.cast(b.op("GreaterOrEqual", rest, half), "INT64"))
    if rounding == "half_even":
        upwards = b.cast(b.op("Mod", quotient, b.int64(2)), "BOOL")
    else:
        upwards = b.op("GreaterOrEqual", total, b.int64(0))
    upwards = upwards if more is None else b.op("Or", upwards, more)
    tie = b.op("And", b.op("Equal", rest, half), upwards)
    up = b.op("Or", b.op("Greater", rest, half), tie)
    return b.op("Add", quotient, b.cast(up, "INT64"))


def stored(b: Builder, values: Any, dtype: str) -> Value:
    """Return integers in an ONNX type, which a file has in a smaller one if that saves bytes.

    Runtimes convert it when they load the file.
    """
    wanted = np.dtype(FLOATS.get(dtype, np.int64))
    few = b.few_bits(int(values.min()), int(values.max()))
    kind, bits = (smallest(values), 0) if few is None else few
    size = values.size * (bits / 8 if bits else np.dtype(kind).itemsize)
    if values.size * wanted.itemsize - size <= _CAST:
        return b.constant(values.astype(wanted), wanted)
    return b.cast(b.constant(values, kind), dtype)


def smallest(values: Any) -> Any:
    """Return the smallest type of integers that holds all values."""
    least, most = int(values.min()), int(values.max())
    for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return kind
    return np.int64
