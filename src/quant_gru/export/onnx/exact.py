"""Exact integer arithmetic in ONNX: float64 up to 2^53, int64 beyond.

A value is a code less its zero point, carried in float64, which holds every code of up to 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru.export.onnx.builder import Builder, Value
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.integer.weighted_sum import WeightedSum

FLOAT32, FLOAT64, INT64 = 1 << 24, 1 << 53, 1 << 62
_DENSE = 1 << 16
_SATURATES_LOG2 = 34

Objects = NDArray[np.object_]


@dataclass(frozen=True)
class Term:
    """A term of a weighted sum: one value, or two whose product it is.

    Attributes:
        factors: One or two values, float64.
        bound: The largest magnitude of the term.
    """

    factors: tuple[Value, ...]
    bound: int


def weighted_sum(b: Builder, name: str, total: WeightedSum, terms: Sequence[Term]) -> Value:
    """Return the result of a weighted sum less its zero point.

    Args:
        b: The builder.
        name: The operator, for messages.
        total: Multipliers, shift and limits.
        terms: The terms.

    Raises:
        QuantGRUError: The sum does not fit 64 bits.
    """
    Ms, k = [int(M) for M in total.multipliers], int(total.shift)
    bound = sum(M * term.bound for M, term in zip(Ms, terms, strict=True))
    if bound < FLOAT64:
        parts = []
        for M, term in zip(Ms, terms, strict=True):
            v = b.op("Mul", *term.factors) if len(term.factors) == 2 else term.factors[0]
            parts.append(scaled(b, v, M, k))
        return _clipped(b, b.op("Round", _added(b, parts)), total)
    parts = []
    for term in terms:
        _fitting(name, term.bound)
        wide = [b.cast(v, "INT64") for v in term.factors]
        parts.append(b.op("Mul", *wide) if len(wide) == 2 else wide[0])
    bounds = [np.array(term.bound, object) for term in terms]
    v = summed(b, name, parts, [np.array(M, object) for M in Ms], bounds, np.array(k))
    return _clipped(b, v, total)


def scaled(b: Builder, v: Value, M: Any, k: Any) -> Value:
    """Return v * M / 2^k in float64; exact, as |v * M| < 2^53."""
    factor = np.ldexp(np.asarray(M, np.float64), -np.asarray(k))
    return v if np.all(factor == 1) else b.op("Mul", v, b.float64(factor))


def _added(b: Builder, parts: Sequence[Value]) -> Value:
    return b.op("Add", *parts) if len(parts) == 2 else parts[0]


def _clipped(b: Builder, v: Value, total: WeightedSum | Quantizer) -> Value:
    lo, hi = total.lo - total.zero_point, total.hi - total.zero_point
    return b.op("Clip", v, b.float64(lo), b.float64(hi))


def _fitting(name: str, bound: int) -> int:
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
    Ms: Sequence[Objects],
    bounds: Sequence[Objects],
    k: NDArray[np.int64],
) -> Value:
    """Return rne(sum of M_i * v_i / 2^k) of int64 as float64, for sums of any size.

    A sum beyond 62 bits is split: with M = M' * 2^s + M'', the upper part is A + floor(B / 2^s) for
    A = sum M' * v and B = sum M'' * v, and what B leaves decides ties alone.

    Args:
        b: The builder.
        name: The operator, for messages.
        terms: v_i, int64.
        Ms: Multipliers, Python integers () or (channels,).
        bounds: The largest magnitude of each v_i, likewise.
        k: Shifts, likewise.

    Raises:
        QuantGRUError: Neither way fits.
    """

    def dot(factors: Sequence[Objects]) -> Value:
        pairs = zip(terms, factors, strict=True)
        return _added(b, [b.op("Mul", v, b.int64(M)) for v, M in pairs])

    def largest(factors: Sequence[Objects]) -> Any:
        return sum(M * bound for M, bound in zip(factors, bounds, strict=True))

    most = int(np.max(largest(Ms)))
    if most < INT64:
        return rounded(b, name, dot(Ms), largest(Ms), k)
    s = most.bit_length() - 61
    upper, lower = [M >> s for M in Ms], [M & ((1 << s) - 1) for M in Ms]
    if int(np.min(k)) <= s or int(np.max(largest(lower))) >= INT64:
        _fitting(name, most)
    low, unit = dot(lower), b.int64(1 << s)
    rest = b.op("Mod", low, unit)
    total = b.op("Add", dot(upper), b.op("Div", b.op("Sub", low, rest), unit))
    bound = np.asarray(largest(Ms), object) // (1 << s) + 2
    return rounded(b, name, total, bound, k - s, b.op("Greater", rest, b.int64(0)))


def rounded(
    b: Builder, name: str, total: Value, bound: Any, k: Any, more: Value | None = None
) -> Value:
    """Return rne(total / 2^k) of int64 as float64, which is exact below 2^53.

    Limits are applied to the float64: ONNX Runtime 1.23 has Clip, Min and Max of int64 wrong.

    Args:
        b: The builder.
        name: The operator, for messages.
        total: int64.
        bound: The largest magnitude of `total`, Python integers, of the shape of k.
        k: Shifts, integers () or (channels,).
        more: bool, True where a fraction of 1 is to be added to `total`; then k > 0.
    """
    k, bound = np.asarray(k, np.int64), np.asarray(bound, object)
    vanishes = np.array(
        [s > 0 and v <= 1 << (int(s) - 1) for s, v in zip(k.flat, bound.flat, strict=True)]
    ).reshape(k.shape)
    for v in bound.flat:
        _fitting(name, int(v))
    right = np.where(vanishes, 0, np.clip(k, 0, 62))
    divisor = b.int64(np.left_shift(np.ones_like(right), right))
    half = b.int64(np.left_shift(np.ones_like(right), np.maximum(right - 1, 0)))
    if vanishes.any():
        total = b.op("Mul", total, b.int64(np.where(vanishes, 0, 1)))
    rest = b.op("Mod", total, divisor)
    quotient = b.op("Div", b.op("Sub", total, rest), divisor)
    odd = b.cast(b.op("Mod", quotient, b.int64(2)), "BOOL")
    upwards = odd if more is None else b.op("Or", odd, more)
    tie = b.op("And", b.op("Equal", rest, half), upwards)
    up = b.op("Or", b.op("Greater", rest, half), tie)
    found = b.cast(b.op("Add", quotient, b.cast(up, "INT64")), "DOUBLE")
    left = np.clip(-k, 0, _SATURATES_LOG2)
    if left.any():
        found = b.op("Mul", found, b.float64(np.ldexp(1.0, left)))
    return found


@dataclass(frozen=True)
class Product:
    """The product of a weight matrix with a value, requantized.

    Args:
        name: The operator of the result.
        weight: Codes (rows, K).
        bias: Bias in 2^shift accumulator units (rows,).
        shift: See `bias`.
        operand: Quantizer of the value.
        total: Multipliers and shifts (rows,), and limits.
    """

    name: str
    weight: Tensor
    bias: Tensor
    shift: int
    operand: Quantizer
    total: WeightedSum

    def __call__(self, b: Builder, v: Value) -> Value:
        """Return the result less its zero point: (.., K) -> (.., rows)."""
        weight = self.weight.cpu().numpy().astype(np.int64)
        bias = self.bias.cpu().numpy().astype(object) * (1 << self.shift)
        (M,), k = self.total.multipliers, self.total.shift
        assert isinstance(M, Tensor)
        assert isinstance(k, Tensor)
        Ms, ks = M.cpu().numpy().astype(object), k.cpu().numpy().astype(np.int64)
        bounds = np.abs(weight).astype(object).sum(1) * self.operand.max_abs + abs(bias)
        accumulator, dtype = self._accumulate(b, v, weight, bias, int(bounds.max()))
        if int((bounds * Ms).max()) < FLOAT64:
            wide = accumulator if dtype == "DOUBLE" else b.cast(accumulator, "DOUBLE")
            v = b.op("Round", scaled(b, wide, Ms.astype(np.float64), ks))
        else:
            wide = accumulator if dtype == "INT64" else b.cast(accumulator, "INT64")
            v = summed(b, self.name, [wide], [Ms], [bounds], ks)
        return _clipped(b, v, self.total)

    def _accumulate(
        self, b: Builder, v: Value, weight: Any, bias: Objects, bound: int
    ) -> tuple[Value, str]:
        """Return the accumulator with bias, and its type: the narrowest that is exact."""
        _fitting(self.name, bound)
        dtype = "FLOAT" if bound < FLOAT32 else "DOUBLE" if bound < FLOAT64 else "INT64"
        v = v if dtype == "DOUBLE" else b.cast(v, dtype)
        product = b.op("MatMul", v, stored(b, weight.T, dtype))
        return (b.op("Add", product, stored(b, bias, dtype)) if np.any(bias) else product), dtype


def stored(b: Builder, values: Any, dtype: str) -> Value:
    """Return integers in an ONNX type, which a file has in a smaller one.

    The conversion is outside of a Scan; runtimes do it when they load the file.
    """
    return b.cast(smallest(b, values), dtype)


def smallest(b: Builder, values: Any) -> Value:
    """Return a constant in the smallest integers that hold its values."""
    least, most = int(values.min()), int(values.max())
    for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return b.constant(values, kind)
    return b.constant(values, np.int64)


def look_up(b: Builder, name: str, table: Table, pre: Quantizer, v: Value) -> Value:
    """Return the output of a table less its zero point.

    Args:
        b: The builder.
        name: The operator of the result, for messages.
        table: The table.
        pre: Quantizer of the input.
        v: Input code less its zero point.
    """
    first = int(table.bounds[0])
    if table.last - first < _DENSE:
        codes = torch.arange(first, table.last + 1, device=table.bounds.device)
        entries = (table(codes) - table.zero_point).cpu().numpy()
        offset = pre.zero_point - first
        place = b.op("Add", v, b.float64(offset)) if offset else v
        if pre.lo < first or table.last < pre.hi:
            place = b.op("Clip", place, b.float64(0), b.float64(table.last - first))
        found = b.op("Gather", smallest(b, entries), b.cast(place, "INT64"), axis=0)
        return b.cast(found, "DOUBLE")
    return _piecewise(b, name, table, pre, v)


def _piecewise(b: Builder, name: str, table: Table, pre: Quantizer, v: Value) -> Value:
    """Evaluate the polynomials of a table in int64."""
    bounds = table.bounds.cpu().numpy().astype(np.int64)
    rows = table.coefficients.cpu().numpy().astype(np.int64)
    q = b.op("Add", v, b.float64(pre.zero_point))
    q = b.cast(b.op("Clip", q, b.float64(bounds[0]), b.float64(table.last)), "INT64")
    if len(bounds) == 1:
        t, columns = b.op("Sub", q, b.int64(bounds[0])), [b.int64(c) for c in rows[0]]
    else:
        if table.segment_shift is not None:
            place = b.op("Sub", q, b.int64(bounds[0]))
            i = b.op("Div", place, b.int64(1 << table.segment_shift))
        else:
            reached = b.op(
                "GreaterOrEqual", b.op("Unsqueeze", q, b.int64([-1])), b.int64(bounds[1:])
            )
            i = b.op("ReduceSum", b.cast(reached, "INT64"), b.int64([-1]), keepdims=0)
        t = b.op("Sub", q, b.op("Gather", b.int64(bounds), i, axis=0))
        columns = [b.op("Gather", b.int64(rows[:, p]), i, axis=0) for p in range(rows.shape[1])]
    y = columns[-1]
    for column in columns[-2::-1]:
        y = b.op("Add", b.op("Mul", y, t), column)
    # every partial sum of a table stays below 2^62
    y = rounded(b, name, y, INT64 - 1, table.shift)
    lo, hi = table.lo - table.zero_point, table.hi - table.zero_point
    return b.op("Clip", y, b.float64(lo), b.float64(hi))


def quantized(b: Builder, x: Value, quantizer: Quantizer) -> Value:
    """Return the code of a real value less its zero point; NaN counts as 0.

    Args:
        b: The builder.
        x: float32.
        quantizer: The quantizer.
    """
    y = b.op("Round", b.op("Div", x, b.float32(quantizer.scale)))
    y = b.op("Where", b.op("IsNaN", x), b.float32(0), y)
    return _clipped(b, b.cast(y, "DOUBLE"), quantizer)


def real(b: Builder, v: Value, quantizer: Quantizer) -> Value:
    """Return the real value, float32, of integers that are codes less their zero point."""
    return b.op("Mul", b.cast(v, "FLOAT"), b.float32(quantizer.scale))


def code_real(b: Builder, codes: Value, quantizer: Quantizer) -> Value:
    """Return the real values, float32, of codes in any type of integers."""
    v = b.op("Sub", b.cast(codes, "DOUBLE"), b.float64(quantizer.zero_point))
    return real(b, v, quantizer)


def real_code(b: Builder, x: Value, quantizer: Quantizer, dtype: str) -> Value:
    """Return the codes, of an ONNX type of integers, of real values."""
    v = b.op("Add", quantized(b, x, quantizer), b.float64(quantizer.zero_point))
    return b.cast(v, dtype)
