"""Look-ups in tables of a plan: a Gather up to 16 bits, polynomials in int64 beyond.

A Gather takes entries of a list of the outputs of a table: stored code by code, or made of its
segments. A runtime makes the list once, when it loads a file: nothing in it depends on an input. A
file has the coefficients of the segments with as few bits as give every entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.rounding import DEFAULT, shifted
from quant_gru.integer.tables import Table
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.exact import (
    FLOAT64,
    INT64,
    Rule,
    clipped,
    converted,
    number,
    rounded,
    scaled,
    smallest,
    stored,
)

_STORED, _LISTED = 1 << 12, 1 << 16  # entries, at most
_STEPS = 1 << 10  # bytes that the nodes take in a file that add up steps
# shifts of constants, in 16 or 32 bits, and of the steps in which slopes are tried
_TRIES = ((15, 11), (15, 14), (15, 17), (30, 11), (30, 14), (30, 17), (30, 20))
_SHIFT = 32  # float64 has every sum of 17 bits with it
_NEAR = sorted(range(-8, 9), key=abs)  # steps in which coefficients are tried

Integers = NDArray[np.int64]


def limits(table: Table, pre: Quantizer) -> tuple[int, int]:
    """Return the input codes less their zero point to which a table clamps."""
    return int(table.bounds[0]) - pre.zero_point, table.last - pre.zero_point


def joins(tables: Sequence[Table]) -> bool:
    """Return whether one look-up serves several tables, with values side by side."""
    return all(map(is_listed, tables))


def look_up(
    b: Builder,
    name: str,
    tables: Sequence[Table],
    pres: Sequence[Quantizer],
    v: Value,
    dtype: str,
    size: int,
    units: Sequence[float] = (),
    sums: Sequence[Sums] = (),
) -> Value:
    """Return outputs of tables less their zero points.

    Args:
        b: The builder.
        name: The operator of the result, for messages.
        tables: One table, or some that `joins` allows.
        pres: Quantizer of the input of each.
        v: Input codes less their zero points, within `limits`, `size` of each table side by side.
        dtype: 'FLOAT' or 'DOUBLE', of `v` and of the result.
        size: See `v`.
        units: What the output of each table is multiplied by, if `is_listed`.
        sums: What each table gives for sums, if `v` are sums.
    """
    if joins(tables):
        units = units or [1.0] * len(tables)
        return _gather(b, tables, pres, v, dtype, size, units, sums or [None] * len(tables))
    (wide,), (table,), (pre,) = converted(b, [v], dtype, "DOUBLE"), tables, pres
    return converted(b, [_piecewise(b, name, table, pre, wide)], "DOUBLE", dtype)[0]


def is_listed(table: Table) -> bool:
    """Return whether a runtime has a list of the outputs of all input codes."""
    return is_stored(table) or is_even(table)


def _gather(
    b: Builder,
    tables: Sequence[Table],
    pres: Sequence[Quantizer],
    v: Value,
    dtype: str,
    size: int,
    units: Sequence[float],
    sums: Sequence[Sums | None],
) -> Value:
    """Take entries from a list of all codes; tables that are the same are listed once."""
    codes = [outputs(t) if of is None else of.outputs for t, of in zip(tables, sums, strict=True)]
    keys = [(each.tobytes(), unit) for each, unit in zip(codes, units, strict=True)]
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    chosen = sorted(first.values())
    places: dict[tuple[bytes, float], int] = {}
    if not any(sums) and are_alike(tables):
        every, entries = lists_of_segments(
            b, [tables[i] for i in chosen], [units[i] for i in chosen], dtype
        )
        places = {keys[i]: entries * place for place, i in enumerate(chosen)}
    else:
        lists, count = [], 0
        for i in chosen:
            listed, entries = (
                list_of(b, tables[i], dtype) if sums[i] is None else stored_list(b, codes[i], dtype)
            )
            lists.append(scaled(b, listed, np.array(units[i]), dtype))
            places[keys[i]] = count
            count += entries
        every = lists[0] if len(lists) == 1 else b.op("Concat", *lists, axis=0)
    starts = [
        int(table.bounds[0]) - pre.zero_point if of is None else of.first
        for table, pre, of in zip(tables, pres, sums, strict=True)
    ]
    offsets = [float(places[key] - start) for key, start in zip(keys, starts, strict=True)]
    same = all(offset == offsets[0] for offset in offsets)
    added = np.array(offsets[0]) if same else np.repeat(offsets, size)
    place = b.op("Add", v, number(b, added, dtype)) if np.any(added) else v
    return b.op("Gather", every, b.cast(place, "INT32"), axis=0)


def _piecewise(b: Builder, name: str, table: Table, pre: Quantizer, v: Value) -> Value:
    """Evaluate the polynomials of a table in int64."""
    bounds = table.bounds.cpu().numpy().astype(np.int64)
    rows = table.coefficients.cpu().numpy().astype(np.int64)
    q = b.cast(b.op("Add", v, b.float64(pre.zero_point)), "INT64")
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
    rounding = "half_up" if table.rounding == "double" else table.rounding
    y = rounded(b, name, y, INT64 - 1, table.shift, rounding)
    return clipped(b, y, table.lo - table.zero_point, table.hi - table.zero_point, "DOUBLE")


# --- lists


def outputs(table: Table) -> Integers:
    """Return the outputs of all input codes less their zero point."""
    codes = torch.arange(int(table.bounds[0]), table.last + 1, device=table.bounds.device)
    found: Integers = (table(codes) - table.zero_point).cpu().numpy().astype(np.int64)
    return found


def is_stored(table: Table) -> bool:
    """Return whether a file has a table code by code."""
    return table.last - int(table.bounds[0]) < _STORED


def is_even(table: Table) -> bool:
    """Return whether few segments of one length make a list, and float64 has every partial sum.

    The list is computed by an operator that rounds ties to even.
    """
    if table.rounding != DEFAULT:
        return False
    if table.segment_shift is None or table.coefficients.shape[1] != 3:
        return False
    length = 1 << table.segment_shift
    most = np.abs(table.coefficients.cpu().numpy().astype(object))
    largest = int((most[:, 0] + most[:, 1] * length + most[:, 2] * length**2).max())
    return len(table.bounds) * length <= _LISTED and largest < FLOAT64


def list_of(b: Builder, table: Table, dtype: str) -> tuple[Value, int]:
    """Return the outputs of all input codes less their zero point, and how many there are.

    Args:
        b: The builder.
        table: A table that `is_stored` or `is_even`.
        dtype: 'FLOAT' or 'DOUBLE', of the list.
    """
    if is_stored(table):
        return stored_list(b, outputs(table), dtype)
    return lists_of_segments(b, [table], [1.0], dtype)


def are_alike(tables: Sequence[Table]) -> bool:
    """Return whether all tables are segments, as many and as long, so that one list has them."""
    forms = {(len(table.bounds), table.segment_shift) for table in tables}
    return len(forms) == 1 and not any(map(is_stored, tables))


def lists_of_segments(
    b: Builder, tables: Sequence[Table], units: Sequence[float], dtype: str
) -> tuple[Value, int]:
    """Return a list as `list_of` of tables that `are_alike`, and how many entries each has.

    Sums are exact in any order. OpenVINO does not end with them as products of constants and sums.

    Args:
        b: The builder.
        tables: The tables.
        units: What the outputs of each are multiplied by.
        dtype: 'FLOAT' or 'DOUBLE', of the list.
    """
    parts = [_coarse(table) or _exact(table) for table in tables]

    def column(name: str) -> Value:
        found = np.stack([getattr(part, name) for part in parts])
        return stored(b, found[:, :, None], "DOUBLE")

    def of_each(numbers: Sequence[float]) -> NDArray[np.float64]:
        found = np.array(numbers, np.float64)
        return found[0] if np.all(found == found[0]) else found[:, None, None]

    t = np.arange(parts[0].length)
    powers = stored(b, np.stack([t, t * t, np.ones_like(t)]), "DOUBLE")
    shifts = np.array([[part.shift, part.shift, part.rest_shift] for part in parts])
    powers = b.op("Mul", powers, b.float64(np.ldexp(1.0, -shifts)[:, :, None]))
    y = b.op("MatMul", b.op("Concat", *map(column, ("c1", "c2", "rests")), axis=2), powers)
    y = b.op("Add", b.op("Round", y), column("codes"))
    lo, hi = (
        of_each([getattr(each, end) - each.zero_point for each in tables]) for end in ("lo", "hi")
    )
    (y,) = converted(b, [clipped(b, y, lo, hi, "DOUBLE")], "DOUBLE", dtype)
    y = scaled(b, y, of_each(units), dtype)
    return b.op("Reshape", y, b.int64([-1])), len(tables[0].bounds) * len(t)


def stored_list(b: Builder, codes: Integers, dtype: str) -> tuple[Value, int]:
    """Return a list of codes, and how many there are."""
    steps = np.diff(codes, append=codes[-1])
    gain = np.dtype(smallest(codes)).itemsize * len(codes) - len(codes) // 2
    if gain > _STEPS and not len(codes) % 2 and 0 <= steps.min() <= steps.max() < 16:
        return _from_steps(b, codes, steps, dtype), len(codes)
    return stored(b, codes, dtype), len(codes)


def of_sums(table: Table, pre: Quantizer, rule: Rule, bounds: Sequence[int]) -> Sums | None:
    """Return a list of what a table gives for each sum before it is rounded, if that is short.

    Args:
        table: The table.
        pre: The quantizer of its input.
        rule: Of the sum; multipliers of all channels.
        bounds: The largest magnitude of each term.
    """
    if not is_stored(table) or rule.k.ndim or any(M.ndim for M in rule.Ms):
        return None
    Ms = [int(M) for M in rule.Ms]
    common = min((M & -M).bit_length() - 1 for M in Ms if M) if any(Ms) else 0
    k = int(rule.k) - common
    most = sum((M >> common) * bound for M, bound in zip(Ms, bounds, strict=True))
    if k < 0 or 2 * most + 2 > _STORED:
        return None
    sums = np.arange(-most, most + 2)
    if k:
        first = max((M >> common).bit_length() for M in Ms)
        shift, steps = (torch.tensor(each) for each in (k, first))
        sums = shifted(torch.from_numpy(sums), shift, rule.rounding, steps).numpy()
    codes = np.clip(sums, int(rule.lo), int(rule.hi)) + pre.zero_point
    codes = np.clip(codes, int(table.bounds[0]), table.last)
    found = outputs(table)[codes - int(table.bounds[0])]
    ends = (np.array(float(end)) for end in (-most, most))
    whole = tuple(np.array(M >> common, object) for M in Ms)
    return Sums(found, -most, Rule(whole, np.array(0), next(ends), next(ends), rule.rounding))


@dataclass(frozen=True)
class Sums:
    """What a table gives for each sum of integers.

    Attributes:
        outputs: Output codes less their zero point.
        first: The sum of the first of them.
        rule: Of the sum, which is neither rounded nor clamped.
    """

    outputs: Integers
    first: int
    rule: Rule


def _from_steps(b: Builder, codes: Integers, steps: Integers, dtype: str) -> Value:
    """Return codes that are stored as steps of 4 bits from each to the next."""
    pairs = stored(b, (steps[::2] * 16 + steps[1::2])[:, None], dtype)
    first = b.op("Floor", b.op("Mul", pairs, number(b, 1 / 16, dtype)))
    second = b.op("Sub", pairs, b.op("Mul", first, number(b, 16, dtype)))
    each = b.op("Reshape", b.op("Concat", first, second, axis=1), b.int64([-1]))
    sums = b.op("CumSum", each, b.int64(0), exclusive=1)
    return b.op("Add", sums, number(b, codes[0], dtype))


@dataclass(frozen=True)
class _Segments:
    """code + rne(rest / 2^rest_shift + (c1 * t + c2 * t^2) / 2^shift); codes are even.

    Apart from codes all is small, so that runtimes that compute float64 in float32 hardly ever
    round to another code.
    """

    codes: Integers
    rests: Integers
    c1: Integers
    c2: Integers
    rest_shift: int
    shift: int
    length: int

    def entries(self, lo: int, hi: int) -> NDArray[np.float64]:
        """Return the list as a file computes it."""
        t = np.arange(self.length, dtype=np.float64)
        y = np.ldexp((self.c2[:, None] * t + self.c1[:, None]) * t, -self.shift)
        y = np.rint(y + np.ldexp(self.rests[:, None], -self.rest_shift)) + self.codes[:, None]
        found: NDArray[np.float64] = np.clip(y, lo, hi).reshape(-1)
        return found


def _exact(table: Table) -> _Segments:
    """Return the coefficients of a table."""
    c0, c1, c2 = table.coefficients.cpu().numpy().astype(np.int64).T
    codes = (c0 >> (table.shift + 1)) * 2
    rests = c0 - (codes << table.shift)
    return _Segments(
        codes, rests, c1, c2, table.shift, table.shift, 1 << int(table.segment_shift or 0)
    )


def _room(values: NDArray[np.float64], bits: int) -> int:
    """Return the largest shift with which values and those near them are below 2^bits."""
    return bits - int(np.frexp(np.abs(values).max() * 1.01)[1])


def _coarse(table: Table) -> _Segments | None:
    """Return coefficients of fewer bits that give every entry, None if some are not found.

    A parabola near that of a segment, c1 * t + c2 * t^2, leaves an interval of constants with which
    every entry is rounded to the same code; the middle is taken.
    """
    length = 1 << int(table.segment_shift or 0)
    count = len(table.bounds)
    wanted = outputs(table)
    padded = np.resize(wanted, count * length).reshape(count, length).astype(np.float64)
    # entries beyond the last code, and those at the limits, may be anything beyond them
    lo, hi = table.lo - table.zero_point, table.hi - table.zero_point
    beyond = np.arange(count * length).reshape(count, length) >= len(wanted)
    least = np.where(beyond | (padded <= lo), -np.inf, padded - 0.5)
    most = np.where(beyond | (padded >= hi), np.inf, padded + 0.5)
    _, near1, near2 = np.ldexp(table.coefficients.cpu().numpy().T, -table.shift)
    # the most with which c1 has 32 bits and c2 16
    shift = min(table.shift, _SHIFT, _room(near1, 31), _room(near2, 15))
    near1, near2 = np.ldexp((near1, near2), shift)
    t = np.arange(length, dtype=np.float64)
    found = np.zeros((count, 3), np.int64)  # constant, c1, c2
    left = np.arange(count)
    for (rest, fine), nudge, steps in product(_TRIES, _NEAR, _NEAR):
        c2 = np.rint(near2[left]) + nudge
        moved = (near2[left] - c2) * length + np.ldexp(steps / length, shift - fine)
        c1 = np.rint(near1[left] + moved)
        p = np.ldexp(np.outer(c1, t) + np.outer(c2, t * t), -shift)
        ends = (least[left] - p).max(1), (most[left] - p).min(1)
        lower, upper = (np.where(np.isinf(end), other, end) for end, other in (ends, ends[::-1]))
        constant = np.rint(np.ldexp((lower + upper) / 2, rest))
        fits = (ends[0] < np.ldexp(constant, -rest)) & (np.ldexp(constant, -rest) < ends[1])
        found[left[fits]] = np.stack([constant * 2.0 ** (30 - rest), c1, c2], 1)[fits].astype(
            np.int64
        )
        left = left[~fits]
        if not len(left):
            constants = found[:, 0] >> (30 - rest)
            codes = (constants >> (rest + 1)) * 2
            rests = constants - (codes << rest)
            segments = _Segments(codes, rests, found[:, 1], found[:, 2], rest, shift, length)
            same = np.array_equal(segments.entries(lo, hi)[: len(wanted)], wanted)
            return segments if same else None
    return None
