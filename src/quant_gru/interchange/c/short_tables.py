"""Quadratic tables in 32-bit arithmetic that equal those of the plan at every code.

Tables of the plan have coefficients of up to 64 bits. For codes of up to 16 bits, 32 bits are
enough: coefficients are rounded, and then moved by a few units until every code of the segment has
its output. The comparison is exhaustive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table

Array = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_BITS = 16
_WORD = 1 << 31


@dataclass(frozen=True)
class ShortTable:
    """A table as `qg_short_table`.

    Attributes:
        first: The code at which segment 0 would begin.
        u: Every segment has 2^u codes.
        e: Shift of c2 * d.
        f: Shift of slope * d.
        g: Shift of the sum.
        lo: Smallest output, without the zero point.
        hi: Largest output.
        coefficients: c0, c1, c2 of each segment.
    """

    first: int
    u: int
    e: int
    f: int
    g: int
    lo: int
    hi: int
    coefficients: list[int]


def short_table(table: Table, pre: Quantizer) -> ShortTable | None:
    """Return a table of 32-bit numbers with equal outputs; None if there is none.

    Args:
        table: The table of the plan.
        pre: Quantizer of its input codes.
    """
    u, degree = table.segment_shift, table.coefficients.shape[1] - 1
    if u is None or not 1 <= u <= 10 or degree != 2 or pre.bits > MOST_BITS:
        return None
    lo, hi = table.lo - table.zero_point, table.hi - table.zero_point
    origin = int(table.bounds[0])
    before = (origin - pre.lo + (1 << u) - 1) >> u
    first = origin - (before << u)
    count = ((pre.hi - first) >> u) + 1
    real = np.zeros((count, 3))
    scale = 2.0**-table.shift
    given = table.coefficients.to(torch.float64).numpy() * scale
    real[before : before + len(given)] = given[: count - before]
    if table.rounding == "floor":
        # the half that such a table contains
        real[before : before + len(given), 0] -= 0.5
    codes = first + np.arange(count << u, dtype=np.int64).reshape(count, 1 << u)
    inside = (codes >= pre.lo) & (codes <= pre.hi)
    wanted = table(torch.from_numpy(codes.clip(pre.lo, pre.hi))).numpy() - table.zero_point
    for row in (*range(before), *range(before + len(given), count)):
        real[row, 0] = wanted[row, -1 if row < before else 0]
    g = 30 - max(int(np.abs(wanted).max()), 1).bit_length()
    span = float(1 << u)
    slope = float((np.abs(real[:, 1]) + 2 * np.abs(real[:, 2]) * span).max())
    f = int(np.floor(30 - np.log2(max(slope * span, 2.0**-20)))) - g
    curve = float(np.abs(real[:, 2]).max())
    if g < 1 or not 0 <= f <= 30:
        return None
    e = int(np.floor(30 - np.log2(max(curve * span, 2.0**-20)))) - g - f
    e = max(0, min(e, 24))
    rows = _fit(real, wanted, inside, u, e, f, g, lo, hi)
    return None if rows is None else ShortTable(first, u, e, f, g, lo, hi, rows)


def _fit(
    real: NDArray[np.float64],
    wanted: Array,
    inside: Flags,
    u: int,
    e: int,
    f: int,
    g: int,
    lo: int,
    hi: int,
) -> list[int] | None:
    """Round the coefficients of all segments; None where a segment cannot be matched."""
    d = np.arange(1 << u, dtype=np.int64)
    half = 1 << (g - 1)
    start = np.rint(real * [2.0**g, 2.0 ** (g + f), 2.0 ** (g + f + e)]).astype(np.int64)
    start[:, 0] += half

    def output(c: Array) -> tuple[Array, Flags]:
        """Return outputs (.., 2^u) of coefficients (.., 3), and whether 32 bits hold all."""
        first = c[..., 2:3] * d
        slope = c[..., 1:2] + (first >> e)
        second = slope * d
        total = c[..., 0:1] + (second >> f)
        fits = np.ones(c.shape[:-1], dtype=np.bool_)
        for value in (c, first, slope, second, total, total - half):
            fits &= (np.abs(value) < _WORD).all(-1)
        return np.clip(total >> g, lo, hi), fits

    found, fits = output(start)
    right = ((found == wanted) | ~inside).all(-1) & fits
    moves = np.stack(
        np.meshgrid(np.arange(-24, 25), np.arange(-3, 4), np.arange(-3, 4), indexing="ij"), axis=-1
    ).reshape(-1, 3)
    moves = moves[np.argsort(np.abs(moves).sum(1), kind="stable")]
    for row in np.flatnonzero(~right):
        tried = start[row] + moves * [max(1, 1 << max(0, g - 16)), 1, 1]
        outputs, fits = output(tried)
        good = ((outputs == wanted[row]) | ~inside[row]).all(-1) & fits
        if not good.any():
            return None
        start[row] = tried[np.argmax(good)]
    return [int(value) for value in start.flatten()]
