"""Look-ups in tables of a plan: a Gather up to 16 bits, polynomials in int64 beyond."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.interchange.onnx.builder import Builder, Value
from quant_gru.interchange.onnx.exact import (
    INT64,
    clipped,
    converted,
    number,
    rounded,
    scaled,
)
from quant_gru.interchange.onnx.listed import (
    Sums,
    are_alike,
    is_even,
    is_stored,
    list_of,
    lists_of_segments,
    outputs,
    stored_list,
)


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
    y = rounded(b, name, y, INT64 - 1, table.shift)
    return clipped(b, y, table.lo - table.zero_point, table.hi - table.zero_point, "DOUBLE")
