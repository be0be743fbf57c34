"""Look-ups in tables of a plan: a Gather up to 16 bits, polynomials in int64 beyond.

A Gather takes entries of a list of the outputs of a table: stored code by code, or made of its
segments. A runtime makes the list once, when it loads a file: nothing in it depends on an input. A
file has the coefficients of the segments with as few bits as give every entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.rounding import shifted
from quant_gru.integer.segments import Segments, segments_of
from quant_gru.integer.tables import Table
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.exact import (
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
_LARGEST = 1 << 18  # output of a list

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
        entries, offsets = listed(b, tables, pres, dtype, units, sums)
        return b.op("Gather", entries, places(b, v, offsets, size, dtype), axis=0)
    (wide,), (table,), (pre,) = converted(b, [v], dtype, "DOUBLE"), tables, pres
    return converted(b, [_piecewise(b, name, table, pre, wide)], "DOUBLE", dtype)[0]


def is_listed(table: Table) -> bool:
    """Return whether a runtime has a list of the outputs of all input codes."""
    return is_stored(table) or is_even(table)


def listed(
    b: Builder,
    tables: Sequence[Table],
    pres: Sequence[Quantizer],
    dtype: str,
    units: Sequence[float] = (),
    sums: Sequence[Sums] = (),
    one: int | None = None,
) -> tuple[Value, list[int]]:
    """Return a list of what tables give for all codes, and what is to be added for a place in it.

    Tables that are the same are listed once.

    Args:
        b: The builder.
        tables: The tables.
        pres: Quantizer of the input of each.
        dtype: 'FLOAT' or 'DOUBLE', of the list.
        units: What the output of each table is multiplied by.
        sums: What each table gives for sums, if places are of sums.
        one: If given, `one` less the output of the first table is listed, too, in units of 1.
    """
    units = units or [1.0] * len(tables)
    of_sums: Sequence[Sums | None] = sums or [None] * len(tables)
    found = zip(tables, of_sums, strict=True)
    codes = [outputs(table) if of is None else of.outputs for table, of in found]
    keys = [(each.tobytes(), unit) for each, unit in zip(codes, units, strict=True)]
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    chosen = sorted(first.values())
    starts: dict[tuple[bytes, float], int] = {}
    parts = [None if any(of_sums) else _segments(tables[i]) for i in chosen]
    if are_alike(parts):
        every, entries = lists_of_segments(b, parts, [units[i] for i in chosen], dtype)
        starts, count = {keys[i]: entries * at for at, i in enumerate(chosen)}, entries * len(parts)
        first_list = None
    else:
        lists, count = [], 0
        for i in chosen:
            part, entries = (
                list_of(b, tables[i], dtype)
                if of_sums[i] is None
                else stored_list(b, codes[i], dtype)
            )
            lists.append(scaled(b, part, np.array(units[i]), dtype))
            starts[keys[i]] = count
            count += entries
        every = lists[0] if len(lists) == 1 else b.op("Concat", *lists, axis=0)
        first_list = lists[0]
    firsts = [
        int(table.bounds[0]) - pre.zero_point if of is None else of.first
        for table, pre, of in zip(tables, pres, of_sums, strict=True)
    ]
    offsets = [starts[key] - start for key, start in zip(keys, firsts, strict=True)]
    if one is not None:
        if first_list is None:
            first_list = b.op("Slice", every, b.int64([0]), b.int64([entries]))
        rest = scaled(b, first_list, np.array(-1 / units[0]), dtype)
        every = b.op("Concat", every, b.op("Add", rest, number(b, one, dtype)), axis=0)
        offsets.append(count - firsts[0])
    return every, offsets


def places(b: Builder, v: Value, offsets: Sequence[int], size: int, dtype: str) -> Value:
    """Return v + offsets, each for `size` values, as places in a list."""
    added = np.array(offsets[0]) if len(set(offsets)) == 1 else np.repeat(offsets, size)
    return b.cast(b.op("Add", v, number(b, added, dtype)) if np.any(added) else v, "INT32")


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
    """Return whether segments of one length make a list of small outputs."""
    u, most = table.segment_shift, max(abs(end - table.zero_point) for end in (table.lo, table.hi))
    if u is None or table.coefficients.shape[1] != 3:
        return False
    return len(table.bounds) << u <= _LISTED and most < _LARGEST


def _segments(table: Table) -> Segments | None:
    """Return what a file has of a table that it has not code by code."""
    return None if is_stored(table) else segments_of(table, int(table.bounds[0]), table.last)


def list_of(b: Builder, table: Table, dtype: str) -> tuple[Value, int]:
    """Return the outputs of all input codes less their zero point, and how many there are.

    Args:
        b: The builder.
        table: A table that `is_stored` or `is_even`.
        dtype: 'FLOAT' or 'DOUBLE', of the list.
    """
    segments = _segments(table)
    if segments is None:
        return stored_list(b, outputs(table), dtype)
    return lists_of_segments(b, [segments], [1.0], dtype)


def are_alike(parts: Sequence[Segments | None]) -> TypeGuard[Sequence[Segments]]:
    """Return whether all are segments, as many and as long, so that one list has them."""
    forms = {None if each is None else (len(each.codes), each.u) for each in parts}
    return len(forms) == 1 and None not in forms


def lists_of_segments(
    b: Builder, parts: Sequence[Segments], units: Sequence[float], dtype: str
) -> tuple[Value, int]:
    """Return a list as `list_of` of segments that `are_alike`, and how many entries each has.

    Runtimes that compute float64 in float32 hardly ever round to another code: all numbers but
    codes are small. A file has c1 less the mean slope around the start of a segment, so that mostly
    16 bits hold it.

    Args:
        b: The builder.
        parts: The segments of each table.
        units: What the outputs of each are multiplied by.
        dtype: 'FLOAT' or 'DOUBLE', of the list.
    """

    def column(of: Callable[[Segments], Integers]) -> Value:
        return stored(b, np.stack([of(part) for part in parts])[:, :, None], "DOUBLE")

    def of_each(numbers: Sequence[float]) -> NDArray[np.float64]:
        found = np.array(numbers, np.float64)
        return found[0] if np.all(found == found[0]) else found[:, None, None]

    def times(v: Value, exponents: Sequence[int]) -> Value:
        return scaled(b, v, of_each([2.0**each for each in exponents]), "DOUBLE")

    def bounded(v: Value, axis: int, first: int, last: int) -> Value:
        return b.op("Slice", v, *(b.int64([each]) for each in (first, last, axis)))

    codes, rests = column(lambda part: part.codes), column(lambda part: part.rests)
    both, count = b.op("Concat", codes, rests, axis=2), len(parts[0].codes)
    rise = b.op("Sub", bounded(both, 1, 2, count), bounded(both, 1, 0, count - 2))
    units_of = np.array([[2.0 ** (p.g - p.u - 1), 2.0 ** (p.s - p.u - 1)] for p in parts])
    rise = b.op("Floor", b.op("MatMul", rise, b.float64(units_of[:, :, None])))
    rise = b.op("Pad", rise, b.int64([0, 1, 0] * 2), mode="edge")
    slope = b.op("Add", rise, column(lambda part: part.c1 - _mean_slopes(part)))
    t = stored(b, np.arange(1 << parts[0].u), "DOUBLE")
    bend = b.op("Floor", b.op("Mul", times(column(lambda p: p.c2), [-p.e for p in parts]), t))
    y = b.op("Mul", b.op("Add", slope, bend), t)
    y = b.op("Add", y, times(rests, [p.s for p in parts]))
    y = b.op("Add", b.op("Floor", times(y, [-p.g for p in parts])), codes)
    y = clipped(b, y, np.array(0.0), of_each([p.hi - p.lo for p in parts]), "DOUBLE")
    lowest = of_each([p.lo for p in parts])
    y = b.op("Add", y, b.float64(lowest)) if np.any(lowest) else y
    (y,) = converted(b, [y], "DOUBLE", dtype)
    y = b.op("Reshape", scaled(b, y, of_each(units), dtype), b.int64([-1]))
    return y, count << parts[0].u


def _mean_slopes(part: Segments) -> Integers:
    """Return the slope over the segments before and after each; the ends have their neighbor's."""
    c0 = (part.codes << part.g) + (part.rests << part.s)
    return np.pad(c0[2:] - c0[:-2] >> (part.u + 1), 1, "edge")


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
