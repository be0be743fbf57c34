"""Sigmoid and tanh as integers: one object for exact, fine, linear and quadratic tables.

    t = clamp(q, qa, qb) - bounds[segment]
    y = clamp(round((c0 + c1*t + c2*t^2) / 2^k) + z_out, lo, hi)

Tables are built once, on the host, in float64, and are part of the plan. No executor computes a
sigmoid or a tanh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.elementary import sigmoid, tanh
from quant_gru.integer.quantizer import Quantizer, container_dtype
from quant_gru.integer.rounding import DEFAULT, shifted
from quant_gru.integer.spline import fit_spline

Array = NDArray[np.float64]

EXACT_BITS = 12  # up to this input width an exact table has one entry per code
NARROW_BITS = 16  # with wider inputs or outputs an exact table may have more segments
MAX_SEGMENTS = 256
MAX_WIDE_SEGMENTS = 1 << 14


FUNCTIONS: dict[str, Callable[[Array], Array]] = {"sigmoid": sigmoid, "tanh": tanh}
RANGES = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}


@dataclass(frozen=True, eq=False)
class Table:
    """A piecewise polynomial from input codes to output codes.

    Attributes:
        bounds: First code of each segment, ascending, integers (S,); bounds[0] is qa.
        last: qb; input codes are clamped to [qa, qb].
        coefficients: c0, c1, .. of each segment, integers (S, degree + 1).
        shift: k >= 0.
        zero_point: z_out.
        lo: Smallest output code.
        hi: Largest output code.
        segment_shift: u if every segment has 2^u codes (the last may be shorter), otherwise None.
        rounding: The rule of the sum. A table has no multiplier, so ``double`` is ``half_up``.
    """

    bounds: Tensor
    last: int
    coefficients: Tensor
    shift: int
    zero_point: int
    lo: int
    hi: int
    segment_shift: int | None
    rounding: str = DEFAULT

    def __call__(self, q: Tensor) -> Tensor:
        """Return the output codes of the input codes `q`, int64, same shape."""
        bounds, coefficients = self.bounds, self.coefficients
        first = bounds[0].to(torch.int64)
        q = torch.minimum(torch.maximum(q, first), torch.full_like(first, self.last))
        if self.segment_shift is None:
            segment = torch.searchsorted(bounds.to(torch.int64), q, right=True) - 1
        else:
            segment = (q - first) >> self.segment_shift
        t = q - bounds[segment]
        y = coefficients[segment, -1].to(torch.int64)
        for power in range(coefficients.shape[1] - 2, -1, -1):
            y = y * t + coefficients[segment, power]
        if self.shift:
            k = torch.full_like(first, self.shift)
            y = shifted(y, k, self.rounding, k)
        return (y + self.zero_point).clamp(self.lo, self.hi)

    def to(self, device: torch.device) -> Table:
        """Return this table with its tensors on `device`."""
        if self.bounds.device == device:
            return self
        return Table(
            self.bounds.to(device),
            self.last,
            self.coefficients.to(device),
            self.shift,
            self.zero_point,
            self.lo,
            self.hi,
            self.segment_shift,
            self.rounding,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        scalars = ("last", "shift", "zero_point", "lo", "hi", "segment_shift", "rounding")
        return (
            all(getattr(self, name) == getattr(other, name) for name in scalars)
            and self.bounds.tolist() == other.bounds.tolist()
            and self.coefficients.tolist() == other.coefficients.tolist()
        )

    __hash__ = None  # type: ignore[assignment]


def compact(values: list[Any]) -> Tensor:
    """Return integers in the smallest dtype that holds all of them.

    Raises:
        QuantGRUError: No dtype holds all of them.
    """
    try:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    except (OverflowError, RuntimeError, ValueError):
        raise QuantGRUError(
            "Expected entries of a table to fit in 64 bits, got larger ones: the scale of its "
            "output is too small"
        ) from None
    return tensor.to(container_dtype(int(tensor.min()), int(tensor.max())))


def build_table(
    function: str,
    pre: Quantizer,
    out: Quantizer,
    activation: str = "exact",
    segments: int | None = None,
    rounding: str = DEFAULT,
) -> Table:
    """Build the table of `function` between two quantizers.

    Args:
        function: 'sigmoid' or 'tanh'.
        pre: Quantizer of the input codes.
        out: Quantizer of the output codes.
        activation: 'exact', 'pwl' (linear segments) or 'quadratic'.
        segments: Maximum number of segments for 'pwl' (default 16) and 'quadratic' (default 8).
        rounding: The rule by which the table will be read.
    """
    if activation == "exact" and pre.bits <= EXACT_BITS:
        codes = np.arange(pre.lo, pre.hi + 1)
        entries = float_table(function, pre, out, codes) - out.zero_point
        return _make(function, out, codes, pre.hi, entries[:, None].tolist(), 0, 0, rounding)
    if activation == "exact":
        return _build_exact(function, pre, out, rounding)
    degree, default = (1, 16) if activation == "pwl" else (2, 8)
    starts, last, real = _spline(function, pre, out, segments or default, degree)
    return _quantize(function, pre, out, starts, last, real, None, rounding)


@lru_cache(maxsize=256)
def _spline(
    function: str, pre: Quantizer, out: Quantizer, segments: int, degree: int
) -> tuple[NDArray[np.int64], int, Array]:
    """Return the first code of each segment, the last code and real coefficients.

    A fit takes 0.1 s, and tables of other rules and of other trials of a search have the same one.
    """
    first, last = _active_range(function, pre, out)
    starts, real = fit_spline(_in_code_units(function, pre, out), first, last, segments, degree)
    return starts, last, real


def float_table(
    function: str, pre: Quantizer, out: Quantizer, codes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the float64 table, the reference: clamp(rint(f(s*(q-z))/s_out) + z_out)."""
    y = np.rint(_in_code_units(function, pre, out)(codes.astype(np.float64)))
    clamped = np.clip(y, out.lo - out.zero_point, out.hi - out.zero_point)
    return np.asarray(clamped.astype(np.int64) + out.zero_point)


def _in_code_units(function: str, pre: Quantizer, out: Quantizer) -> Callable[[Array], Array]:
    return lambda q: FUNCTIONS[function](pre.scale * (q - pre.zero_point)) / out.scale


def _active_range(function: str, pre: Quantizer, out: Quantizer) -> tuple[int, int]:
    """Return [qa, qb], outside which the monotonic float64 table is constant."""

    def value(code: int) -> int:
        return int(float_table(function, pre, out, np.array([code]))[0])

    first, last = value(pre.lo), value(pre.hi)
    if first == last:
        return pre.lo, pre.lo
    low, high = pre.lo, pre.hi
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) == first else (low, middle)
    qa = low
    low, high = pre.lo, pre.hi
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) == last else (middle, high)
    return qa, high


def _build_exact(function: str, pre: Quantizer, out: Quantizer, rounding: str) -> Table:
    """Use as few segments as wide codes need; at most 256 for codes of up to 16 bits."""
    most = MAX_SEGMENTS
    table = _build_uniform(function, pre, out, most, rounding)
    if max(pre.bits, out.bits) <= NARROW_BITS:
        return table
    while most < MAX_WIDE_SEGMENTS and _largest_difference(table, function, pre, out) > 1:
        most *= 2
        table = _build_uniform(function, pre, out, most, rounding)
    return table


def _build_uniform(
    function: str, pre: Quantizer, out: Quantizer, most: int, rounding: str
) -> Table:
    """Build quadratic segments of equal length, a power of two; at most `most` segments."""
    qa, qb = _active_range(function, pre, out)
    u = max(0, (max(qb - qa, 1) - 1).bit_length() - (most.bit_length() - 1))
    while ((qb - qa) >> u) >= most:
        u += 1
    starts = np.arange(qa, qb + 1, 1 << u)
    real = _fit_uniform(_in_code_units(function, pre, out), starts, 1 << u)
    return _quantize(function, pre, out, starts, qb, real, u, rounding)


def _largest_difference(table: Table, function: str, pre: Quantizer, out: Quantizer) -> int:
    """Return the largest difference in codes to the float64 table.

    It samples each segment where a quadratic fit to a cubic has its largest errors.
    """
    assert table.segment_shift is not None
    length = 1 << table.segment_shift
    places = np.array([0, length // 4, length * 3 // 4, length - 1])
    codes = table.bounds.to(torch.int64).numpy()[:, None] + places
    codes = np.minimum(codes, table.last)
    found = table(torch.from_numpy(codes)).numpy()
    return int(np.abs(found - float_table(function, pre, out, codes)).max())


def _fit_uniform(f: Callable[[Array], Array], starts: NDArray[np.int64], length: int) -> Array:
    """Fit quadratics through the three Chebyshev nodes of each segment, (S, 3), in powers of t."""
    span = length - 1
    node = math.sqrt(0.75)
    nodes = 0.5 * span * np.array([1.0 - node, 1.0, 1.0 + node])
    y = f(starts[:, None] + nodes)
    if span == 0:
        return np.stack([y[:, 0], 0 * y[:, 0], 0 * y[:, 0]], axis=1)
    t0, t1, t2 = nodes
    d01 = (y[:, 1] - y[:, 0]) / (t1 - t0)
    d12 = (y[:, 2] - y[:, 1]) / (t2 - t1)
    c2 = (d12 - d01) / (t2 - t0)
    c1 = d01 - c2 * (t0 + t1)
    c0 = y[:, 0] - c1 * t0 - c2 * t0 * t0
    return np.stack([c0, c1, c2], axis=1)


def _quantize(
    function: str,
    pre: Quantizer,
    out: Quantizer,
    starts: NDArray[np.int64],
    last: int,
    real: Array,
    u: int | None,
    rounding: str,
) -> Table:
    """Round the coefficients to integers, with the largest shift that keeps every sum exact.

    Sums stay below 2^30 if both widths are at most 8 bits, below 2^52 up to 16 bits, and below
    2^62 beyond. 32-bit integers, float64 and 64-bit integers are exact in these ranges. A spline
    stays continuous. A table that is read with ``floor`` contains the half that rounds it.
    """
    width = max(pre.bits, out.bits)
    budget = 30 if width <= 8 else 52 if width <= 16 else 62
    lengths = np.diff(np.append(starts, last)).astype(np.float64)
    t = np.maximum(lengths, 1.0)
    size = sum(np.abs(real[:, p]) * t**p for p in range(real.shape[1]))
    largest = float(np.max(size)) + 1.0
    mantissa, exponent = math.frexp(largest)
    k = max(0, budget - (exponent - 1 if mantissa == 0.5 else exponent) - 1)
    rows = _joined_rows(real, lengths, k) if u is None else _uniform_rows(real, (1 << u) - 1, k)
    if rounding == "floor" and k:
        rows = [[c0 + (1 << (k - 1)), *others] for c0, *others in rows]
    return _make(function, out, starts, last, rows, k, u, rounding)


def _joined_rows(real: Array, lengths: Array, k: int) -> list[list[int]]:
    """Round coefficients times 2^k so that every segment starts where the previous one ends."""
    rows: list[list[int]] = []
    for i, row in enumerate(real.tolist()):
        T = int(lengths[i])
        if i > 0:
            previous, T0 = rows[-1], int(lengths[i - 1])
            c0 = sum(c * T0**p for p, c in enumerate(previous))
        else:
            c0 = round(row[0] * 2.0**k)
        upper = [round(c * 2.0**k) for c in row[1:]]
        if T:
            # the slope is rounded last, so that the segment ends at the end of the spline's segment
            end = round(sum(c * T**p for p, c in enumerate(row)) * 2.0**k)
            rest = end - c0 - sum(c * T ** (p + 2) for p, c in enumerate(upper[1:]))
            upper[0] = round(rest / T)
        rows.append([c0, *upper])
    return rows


def _uniform_rows(real: Array, last: int, k: int) -> list[list[int]]:
    """Round coefficients of quadratics times 2^k; t is in 0..last.

    c1 and c0 compensate for the rounding errors of c2 and c1 (best linear fit of t^2).
    """
    length = float(last)
    scaled = real * 2.0**k
    c2 = np.rint(scaled[:, 2])
    lost = scaled[:, 2] - c2
    slope = scaled[:, 1] + lost * length
    c1 = np.rint(slope)
    c0 = np.rint(scaled[:, 0] - lost * (length * length) / 8 + (slope - c1) * length / 2)
    return [[int(c) for c in row] for row in np.stack([c0, c1, c2], axis=1).tolist()]


def _make(
    function: str,
    out: Quantizer,
    starts: NDArray[np.int64],
    last: int,
    rows: list[list[int]],
    shift: int,
    u: int | None,
    rounding: str,
) -> Table:
    fmin, fmax = (round(edge / out.scale) + out.zero_point for edge in RANGES[function])
    return Table(
        compact(starts.tolist()),
        int(last),
        compact(rows),
        shift,
        out.zero_point,
        max(out.lo, fmin),
        min(out.hi, fmax),
        u,
        rounding,
    )
