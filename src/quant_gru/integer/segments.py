"""Tables as parabolas in 32-bit integers, the form in which C source and ONNX files have them.

    t      = input code - start of its segment
    change = ((rest << s) + (c1 + ((c2 * t) >> e)) * t) >> g
    output = min(max(code + change, 0), hi - lo) + lo

A table of the plan has coefficients of up to 64 bits. For codes of up to 16 bits fewer do: every
output is compared with that of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from quant_gru.integer.tables import Table

Array = NDArray[np.int64]

MOST_CODES, _MOST_OUTPUTS = 1 << 16, 1 << 24
_REST_BITS, _C2_BITS = 16, 15
_WORD = 1 << 31
_NEAR = sorted(range(-4, 5), key=abs)  # by how much c1 and c2 are moved, at first
_SCALES, _MOST_Q = 2 ** np.arange(14), 256


@dataclass(frozen=True)
class Segments:
    """Parabolas over segments of 2^u input codes.

    Attributes:
        first: The input code at which segment 0 begins.
        u: Every segment has 2^u codes.
        e: Shift of c2 * t.
        s: Shift of `rest`.
        g: Shift of the sum.
        lo: Smallest output, without the zero point.
        hi: Largest output.
        codes: Output at the start of each segment less `lo`, rounded down (S,); seldom below 0.
        rests: What was rounded off, and the half that rounds: 16 bits, unsigned (S,).
        c1: Slopes at the start, 32 bits (S,).
        c2: Curvatures, 16 bits (S,).
    """

    first: int
    u: int
    e: int
    s: int
    g: int
    lo: int
    hi: int
    codes: Array
    rests: Array
    c1: Array
    c2: Array

    def __call__(self, codes: Array) -> Array:
        """Return the outputs of input codes, without the zero point."""
        i, t = (codes - self.first) >> self.u, (codes - self.first) & ((1 << self.u) - 1)
        sums = (self.rests[i] << self.s) + _rise(self.c1[i], self.c2[i], t, self.e)
        found: Array = np.clip(self.codes[i] + (sums >> self.g), 0, self.hi - self.lo) + self.lo
        return found


def segments_of(table: Table, first: int, last: int) -> Segments | None:
    """Return segments with the outputs of a table for input codes from first to last.

    Args:
        table: The table of the plan.
        first: The smallest input code; segment 0 begins at it or before.
        last: The largest.

    Returns:
        None if the table has other segments than parabolas over 2^u codes, if there are more than
        2^16 input codes, or if no integers give some output.
    """
    u = table.segment_shift
    if u is None or not 1 <= u <= 10 or table.coefficients.shape[1] != 3:
        return None
    lo, hi = table.lo - table.zero_point, table.hi - table.zero_point
    if last - first >= MOST_CODES or hi - lo >= _MOST_OUTPUTS:
        return None
    origin = int(table.bounds[0])
    before = (origin - first + (1 << u) - 1) >> u
    begin = origin - (before << u)
    count = ((last - begin) >> u) + 1
    codes = begin + np.arange(count << u, dtype=np.int64).reshape(count, 1 << u)
    given = torch.from_numpy(codes.clip(first, last)).to(table.bounds.device)
    wanted = (table(given) - table.lo).cpu().numpy()
    real = _real(table, wanted, before)
    # codes beyond the first and the last may have any output, and outputs at a limit may be beyond
    free = (codes < first) | (codes > last)
    least = np.where(free | (wanted == 0), np.iinfo(np.int32).min, wanted)
    most = np.where(free | (wanted == hi - lo), np.iinfo(np.int32).max, wanted + 1)
    rise = float((np.abs(real[:, 1]) + 2 * np.abs(real[:, 2]) * 2.0**u).max()) * 2.0**u
    curve = _exponent(float(np.abs(real[:, 2]).max()))
    g = min(29, 30 - _exponent(rise), _C2_BITS - curve)
    if g < 1:
        return None
    e, s = min(u, _C2_BITS - g - curve), max(g - _REST_BITS, 0)
    near = np.ldexp(real, [g, g, g + e])
    rows = _found(near, least << g, (most << g) - 1, u, e, s, g)
    if rows is None:
        return None
    c0, c1, c2 = rows.T
    return Segments(begin, u, e, s, g, lo, hi, c0 >> g, (c0 & ((1 << g) - 1)) >> s, c1, c2)


def _exponent(value: float) -> int:
    """Return the smallest n for which a value and those near it are below 2^n."""
    return int(np.frexp(max(value * 1.01, 2.0**-60))[1])


def _real(table: Table, wanted: Array, before: int) -> NDArray[np.float64]:
    """Return the coefficients of each row of outputs; constants before and after the table."""
    given = np.ldexp(table.coefficients.to(torch.float64).cpu().numpy(), -table.shift)
    half = 0.0 if table.rounding == "floor" else 0.5
    real = np.stack([wanted[:, 0] + half, *np.zeros((2, len(wanted)))], 1)
    real[before : before + len(given)] = given[: len(wanted) - before]
    real[before : before + len(given), 0] += half + table.zero_point - table.lo
    return real


def _rise(c1: Array, c2: Array, t: Array, e: int) -> Array:
    found: Array = (c1 + ((c2 * t) >> e)) * t
    return found


def _found(
    near: NDArray[np.float64],
    least: Array,
    most: Array,
    u: int,
    e: int,
    s: int,
    g: int,
) -> Array | None:
    """Return c0, c1 and c2 of all segments, (S, 3); None where a segment has none.

    c1 and c2 leave an interval of c0, which is `code` and `rest`, with which all outputs are right.
    What is nearest to the real c0 in the inner half is taken.

    Args:
        near: Real coefficients, (S, 3).
        least: The smallest sum of each code, (S, 2^u).
        most: The largest.
        u: See `Segments`, as the others.
        e: Shift of c2 * t.
        s: Shift of `rest`.
        g: Shift of the sum.
    """
    t = np.arange(1 << u, dtype=np.int64)
    rows = np.zeros(near.shape, dtype=np.int64)

    def fitting(real: Array, least: Array, most: Array, more1: Array, more2: int) -> Array:
        """Return rows of c0, c1, c2 and whether they are right, of each of `more1`."""
        c2 = np.rint(real[2]).astype(np.int64) + more2
        lost = np.ldexp(real[2] - c2, u - e)  # c1 makes up for it where the segment ends
        c1 = np.rint(real[1] + lost).astype(np.int64) + more1
        rise = _rise(c1[:, None], c2[:, None], t, e)
        low = (least - rise).max(1) + (1 << s) - 1 >> s
        high = (most - rise).min(1) >> s
        inner = np.minimum(high - low, 1 << (g - s)) >> 2
        at = np.rint(np.ldexp(real[0], -s)).astype(np.int64)
        c0 = np.minimum(np.maximum(at, low + inner), high - inner) << s
        sums = (c0 & ((1 << g) - 1))[:, None] + rise
        fits = (low <= high) & (np.abs(c1) < _WORD) & (np.abs(c2) < 1 << _C2_BITS)
        for value in (c2[:, None] * t, rise, sums):
            fits &= (np.abs(value) < _WORD).all(1)
        return np.stack([c0, c1, c2 + 0 * c1, fits], 1)

    left = np.arange(len(near))
    for more2 in _NEAR:
        for more1 in _NEAR:
            found = fitting(near[left].T, least[left], most[left], np.array(more1), more2)
            fits = found[:, 3] == 1
            rows[left[fits]] = found[fits, :3]
            left = left[~fits]
            if not len(left):
                return rows
    # Where slopes are near p / q, every q-th sum is near a whole number, and its side alone counts:
    # beside the line through these numbers, a parabola of any size has the same sides.
    for row in left:
        c0, c1 = np.ldexp(near[row, :2], -g)
        slope = Fraction(c1).limit_denominator(_MOST_Q)
        q = 2 * slope.denominator
        line = np.ldexp([round(c0 * q) / q, float(slope), 0.0], g)
        for scale, more2 in product(_SCALES, _NEAR):
            real = (line + scale * (near[row] - line))[:, None]
            found = fitting(real, least[row], most[row], np.array(_NEAR), more2)
            right = np.flatnonzero(found[:, 3])
            if len(right):
                rows[row] = found[right[0], :3]
                break
        else:
            return None
    return rows
