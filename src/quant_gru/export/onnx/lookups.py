"""Tables of a plan in ONNX: a Gather of codes up to 12 bits, polynomials of segments beyond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quant_gru.export.onnx.builder import Builder, Value
from quant_gru.export.onnx.exact import (
    FLOAT64,
    INT64,
    clipped,
    converted,
    number,
    rounded,
    stored,
)
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table

_ENTRIES = 1 << 12  # of a table that is stored code by code


def limits(table: Table, pre: Quantizer) -> tuple[int, int]:
    """Return the input codes less their zero point to which a table clamps."""
    return int(table.bounds[0]) - pre.zero_point, table.last - pre.zero_point


def joins(tables: Sequence[Table]) -> bool:
    """Return whether one look-up serves several tables, with values side by side."""
    return any(all(map(kind, tables)) for kind in (is_dense, _is_even))


def look_up(
    b: Builder,
    name: str,
    tables: Sequence[Table],
    pres: Sequence[Quantizer],
    v: Value,
    dtype: str,
    size: int,
    units: Sequence[float] = (),
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
        units: What the output of each table is multiplied by, if they are stored code by code.
    """
    if all(is_dense(table) for table in tables):
        return _gather(b, tables, pres, v, dtype, size, units or [1.0] * len(tables))
    (wide,) = converted(b, [v], dtype, "DOUBLE")
    if all(_is_even(table) for table in tables):
        found = _segments(b, tables, pres, wide, size)
    else:
        (table,), (pre,) = tables, pres
        found = _piecewise(b, name, table, pre, wide)
    return converted(b, [found], "DOUBLE", dtype)[0]


def is_dense(table: Table) -> bool:
    """Return whether a table is stored code by code."""
    return table.last - int(table.bounds[0]) < _ENTRIES


def _is_even(table: Table) -> bool:
    """Return whether all segments have one length, and float64 has every partial sum."""
    if is_dense(table) or table.segment_shift is None or table.coefficients.shape[1] != 3:
        return False
    most = np.abs(table.coefficients.cpu().numpy().astype(object))
    length = 1 << table.segment_shift
    return int((most[:, 0] + most[:, 1] * length + most[:, 2] * length**2).max()) < FLOAT64


def _spread(values: Sequence[float], size: int) -> NDArray[np.float64]:
    """Return values for channels side by side, () if all are the same."""
    same = all(value == values[0] for value in values)
    return np.array(values[0]) if same else np.repeat(np.array(values, np.float64), size)


def _moved(b: Builder, v: Value, offsets: Sequence[float], size: int, dtype: str) -> Value:
    added = _spread(offsets, size)
    return b.op("Add", v, number(b, added, dtype)) if np.any(added) else v


def _gather(
    b: Builder,
    tables: Sequence[Table],
    pres: Sequence[Quantizer],
    v: Value,
    dtype: str,
    size: int,
    units: Sequence[float],
) -> Value:
    """Take entries from a list of all codes; tables that are the same are stored once."""
    entries: list[NDArray[np.int64]] = []
    factors: list[float] = []
    places, offsets = {}, []
    for table, pre, unit in zip(tables, pres, units, strict=True):
        first = int(table.bounds[0])
        codes = torch.arange(first, table.last + 1, device=table.bounds.device)
        found = (table(codes) - table.zero_point).cpu().numpy()
        key = (found.tobytes(), unit)
        if key not in places:
            places[key] = sum(map(len, entries))
            entries.append(found)
            factors.append(unit)
        offsets.append(float(places[key] + pre.zero_point - first))
    listed = stored(b, np.concatenate(entries), dtype)
    if any(factor != 1 for factor in factors):
        counts = [len(each) for each in entries]
        same = all(factor == factors[0] for factor in factors)
        factor = np.array(factors[0]) if same else np.repeat(factors, counts)
        listed = b.op("Mul", listed, number(b, factor, dtype))
    place = _moved(b, v, offsets, size, dtype)
    return b.op("Gather", listed, b.cast(place, "INT32"), axis=0)


def _segments(
    b: Builder, tables: Sequence[Table], pres: Sequence[Quantizer], v: Value, size: int
) -> Value:
    """Evaluate segments of one length in float64.

    c_0 is split into an even code and a rest, so that the polynomial stays small: runtimes that
    compute float64 in float32 then hardly ever round to another code.
    """
    lengths = [float(1 << int(table.segment_shift or 0)) for table in tables]
    starts = np.cumsum([0, *(len(table.bounds) for table in tables)])[:-1]
    scaled = b.op("Mul", v, b.float64(_spread([1 / length for length in lengths], size)))
    place = _moved(
        b,
        scaled,
        [
            (pre.zero_point - int(table.bounds[0])) / length + int(start)
            for table, pre, length, start in zip(tables, pres, lengths, starts, strict=True)
        ],
        size,
        "DOUBLE",
    )
    segment = b.op("Floor", place)
    t = b.op("Sub", place, segment)  # in units of a segment
    i = b.cast(segment, "INT32")
    rows = [table.coefficients.cpu().numpy().astype(np.int64) for table in tables]
    codes = [(row[:, 0] >> (table.shift + 1)) * 2 for row, table in zip(rows, tables, strict=True)]
    rests = [
        row[:, 0] - (code << table.shift)
        for row, code, table in zip(rows, codes, tables, strict=True)
    ]

    def of_segment(columns: Sequence[NDArray[np.int64]], power: int) -> Value:
        parts = [
            length**power / 2.0**table.shift for length, table in zip(lengths, tables, strict=True)
        ]
        return b.op("Gather", _weighted(b, columns, parts), i, axis=0)

    y = of_segment([row[:, 2] for row in rows], 2)
    y = b.op("Add", b.op("Mul", y, t), of_segment([row[:, 1] for row in rows], 1))
    y = b.op("Add", b.op("Mul", y, t), of_segment(rests, 0))
    code = b.op("Gather", stored(b, np.concatenate(codes), "DOUBLE"), i, axis=0)
    y = b.op("Add", code, b.op("Round", y))
    lo, hi = (
        _spread([float(getattr(table, end) - table.zero_point) for table in tables], size)
        for end in ("lo", "hi")
    )
    return clipped(b, y, lo, hi, "DOUBLE")


def _weighted(b: Builder, columns: Sequence[NDArray[np.int64]], factors: Sequence[float]) -> Value:
    """Return integers of tables one after the other, times a power of two for each table."""
    values = stored(b, np.concatenate(columns), "DOUBLE")
    same = all(factor == factors[0] for factor in factors)
    counts = [len(column) for column in columns]
    factor = np.array(factors[0]) if same else np.repeat(factors, counts)
    return values if np.all(factor == 1) else b.op("Mul", values, b.float64(factor))


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
    y = rounded(b, name, y, INT64 - 1, table.shift)
    return clipped(b, y, table.lo - table.zero_point, table.hi - table.zero_point, "DOUBLE")
