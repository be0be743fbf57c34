"""The parameter document in few bytes: shorter JSON beside columns of integers.

The JSON has widths and kinds of the operators once, under `operators`, and those of a cell where
they differ. It names the tables of a cell by number. The columns are: each table once, in the order
in which cells name them; then, of each cell, the scales as float32 bits (of activations, then of
weights that were set by hand), the zero points, and the mean of the input.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from quant_gru.config import ACTIVATIONS, FIXED_RANGE, OPERATORS, WEIGHTS
from quant_gru.errors import ParameterError
from quant_gru.parameters.checks import exponent_of
from quant_gru.parameters.columns import Integers, Reader, column
from quant_gru.parameters.schema import Shape, Strict

MOST_SEGMENTS = 1 << 16
MOST_SEGMENTS_OF_ALL = 1 << 22
_NUMBERS = ("shift", "zero_point", "lo", "hi")
_Width = Annotated[int, Field(ge=1, le=32)] | None
_Flags = Annotated[str, Field(pattern=f"^[01]{{{len(OPERATORS)}}}$")]
_Granularity = Literal["tensor", "gate", "channel"]
_Number = Annotated[int, Field(ge=0, le=1 << 31)]


class _Operators(Strict):
    """Widths and kinds of all operators, in the order of `OPERATORS`."""

    bitwidth: list[_Width] = Field(min_length=len(OPERATORS), max_length=len(OPERATORS))
    is_symmetric: _Flags
    is_unsigned: _Flags
    granularity: list[_Granularity] = Field(min_length=len(WEIGHTS), max_length=len(WEIGHTS))


class _Cell(Strict):
    """What a cell does not have in columns."""

    tables: list[_Number] = Field(min_length=len(FIXED_RANGE), max_length=len(FIXED_RANGE))
    exp2_inv: int | None = Field(None, description="of input_mean")
    pinned: list[_Number] | None = Field(
        None, min_length=len(WEIGHTS), max_length=len(WEIGHTS), description="scales of weights"
    )
    operators: _Operators | None = None


class _Parts(Strict):
    """What is packed of a document."""

    cells: list[_Cell]
    operators: _Operators


def pack(document: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the JSON and the columns of a document of `to_document`, which may have more keys."""
    sections, notes = document["config"]["GRU_config"], {}
    own: dict[str, dict[str, Any]] = {}
    for name, entry in sections["operator_config"].items():
        if name not in OPERATORS:
            notes[name] = entry
            continue
        own[name] = entry
        more = {key: value for key, value in entry.items() if key not in _Operators.model_fields}
        if more:
            notes[name] = more
    shared = _operators(own)
    tables: dict[bytes, int] = {}
    parts: list[bytes] = []
    cells = []
    for cell in document["cells"]:
        found: dict[str, Any] = {
            "tables": [
                tables.setdefault(table_columns(cell["tables"][name]), len(tables))
                for name in FIXED_RANGE
            ]
        }
        operators, mean = cell["operators"], cell["input_mean"]
        pinned = [operators[name]["scale"] or [] for name in WEIGHTS]
        scales = [each["scale"] for each in map(operators.get, ACTIVATIONS) if each["bitwidth"]]
        scales += [scale for each in pinned for scale in each]
        bits = np.array(scales, dtype="<f4").view("<i4")
        parts.append(column(bits.astype(np.int64)))
        points = [operators[name]["zero_point"] for name in ACTIVATIONS]
        parts.append(column([point for point in points if point is not None]))
        if mean is not None:
            found["exp2_inv"] = mean["exp2_inv"]
            parts.append(column(mean["values"]))
        if any(pinned):
            found["pinned"] = list(map(len, pinned))
        if (differing := _operators(operators)) != shared:
            found["operators"] = differing
        cells.append(found)
    sections = {**sections, "operator_config": notes}
    config = {**document["config"], "GRU_config": sections}
    packed = {**document, "config": config, "cells": cells, "operators": shared}
    return packed, b"".join([*tables, *parts])


def unpack(packed: dict[str, Any], raw: bytes, where: str) -> dict[str, Any]:
    """Return the document of which `pack` made the JSON and the columns.

    Raises:
        ParameterError: A part is missing or too large. Values are not checked.
        ValidationError: The JSON has not the form of a packed document.
    """
    given = dict(packed)
    parts = {key: given.pop(key) for key in _Parts.model_fields if key in given}
    found = _Parts.model_validate(parts)
    cells, shared = found.cells, found.operators
    shape = Shape.model_validate(_object(given, "gru", where))
    config = _object(given, "config", where)
    sections = _object(config, "GRU_config", where)
    notes = _object(sections, "operator_config", where)
    reader = Reader(raw, where)
    tables = _tables(cells, reader, where)
    own = _entries(shared)
    merged = {key: value for key, value in notes.items() if key not in OPERATORS}
    for name, entry in own.items():
        more = _object(notes, name, where) if name in notes else {}
        merged[name] = {**(entry if name in WEIGHTS else _of_activation(entry)), **more}
    given["config"] = {**config, "GRU_config": {**sections, "operator_config": merged}}
    given["cells"] = [
        {
            "layer": i // shape.directions,
            "reverse": i % shape.directions == 1,
            "operators": _cell(cell, cell.operators or shared, reader),
            "tables": {
                name: tables[number] for name, number in zip(FIXED_RANGE, cell.tables, strict=True)
            },
            "input_mean": _mean(cell, reader, _features(shape, i)),
        }
        for i, cell in enumerate(cells)
    ]
    reader.finish()
    return given


def _object(parent: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    found = parent.get(key)
    if not isinstance(found, dict):
        raise ParameterError(f"Expected {key!r} to be an object, got {found!r:.80} ({where})")
    return found


def _operators(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return widths and kinds as `_Operators`."""
    every = [entries[name] for name in OPERATORS]
    return {
        "bitwidth": [each["bitwidth"] for each in every],
        "is_symmetric": "".join("01"[each["is_symmetric"]] for each in every),
        "is_unsigned": "".join("01"[each["is_unsigned"]] for each in every),
        "granularity": [entries[name]["granularity"] for name in WEIGHTS],
    }


def _entries(operators: _Operators) -> dict[str, dict[str, Any]]:
    """Return the widths and kinds of each operator."""
    granularity = dict(zip(WEIGHTS, operators.granularity, strict=True))
    return {
        name: {
            "bitwidth": operators.bitwidth[i],
            "is_symmetric": operators.is_symmetric[i] == "1",
            "is_unsigned": operators.is_unsigned[i] == "1",
            "granularity": granularity.get(name),
        }
        for i, name in enumerate(OPERATORS)
    }


def _of_activation(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "granularity"}


def _cell(cell: _Cell, operators: _Operators, reader: Reader) -> dict[str, Any]:
    """Return the operators of a cell."""
    entries = _entries(operators)
    active = [name for name in ACTIVATIONS if entries[name]["bitwidth"] is not None]
    counts = cell.pinned or [0] * len(WEIGHTS)
    bits = reader.column(len(active) + sum(counts)).astype("<i4")
    scales = iter([float(scale) for scale in bits.view("<f4")])
    points = reader.column(len(active)).tolist()
    given: dict[str, tuple[Any, ...]] = {}
    for name, point in zip(active, points, strict=True):
        scale = next(scales)
        given[name] = scale, point, exponent_of(scale)
    for name, count in zip(WEIGHTS, counts, strict=False):
        given[name] = [next(scales) for _ in range(count)] or None, None, None
    return {
        name: {
            **_of_activation(entry),
            **dict(
                zip(("scale", "zero_point", "exp2_inv"), given.get(name, (None,) * 3), strict=True)
            ),
            "granularity": entry["granularity"],
        }
        for name, entry in entries.items()
    }


def _features(shape: Shape, cell: int) -> int:
    """Return the inputs of a cell."""
    D = shape.directions
    return shape.hidden_size * D if cell >= D else shape.input_size


def _mean(cell: _Cell, reader: Reader, features: int) -> dict[str, Any] | None:
    if cell.exp2_inv is None:
        return None
    return {"exp2_inv": cell.exp2_inv, "values": reader.column(features).tolist()}


def _tables(cells: list[_Cell], reader: Reader, where: str) -> list[dict[str, Any]]:
    """Return the tables that cells name."""
    tables: list[dict[str, Any]] = []
    total = 0
    for cell in cells:
        for number in cell.tables:
            if number > len(tables):
                raise ParameterError(
                    f"Expected tables in the order of their use, got {number} after "
                    f"{len(tables)} ({where})"
                )
            if number == len(tables):
                tables.append(_read_table(reader, where))
            total += len(tables[number]["bounds"])
            if total > MOST_SEGMENTS_OF_ALL:
                raise ParameterError(
                    f"Expected tables of at most {MOST_SEGMENTS_OF_ALL} segments in all, got more "
                    f"({where})"
                )
    return tables


def table_columns(table: dict[str, Any]) -> bytes:
    """Return the columns of a table.

    They are: the number of segments, the degree, the first bound, `last`,
    `_NUMBERS` and segment_shift or
    -1; the lengths of segments if these differ; the coefficients of the first segment; then, for
    each power, what the others differ by from the polynomial before them, moved to their start.
    """
    bounds = np.array(table["bounds"], dtype=np.int64)
    c = np.array(table["coefficients"], dtype=np.int64)
    u = table["segment_shift"]
    lengths = np.diff(bounds)
    numbers = [len(bounds), c.shape[1] - 1, bounds[0], table["last"]]
    numbers += [*(table[name] for name in _NUMBERS), -1 if u is None else u]
    parts = [column(numbers)]
    if u is None:
        parts.append(column(lengths))
    parts.append(column(c[0]))
    parts += [column(c[1:, p] - c[:-1, p] - _moved(c[:-1], lengths, p)) for p in range(c.shape[1])]
    return b"".join(parts)


def _moved(c: Integers, lengths: Integers, power: int) -> Integers:
    """Return by how much a coefficient changes where polynomials (S, d + 1) begin later."""
    columns = range(power + 1, c.shape[1])
    factor = ((0, 1, 1), (0, 0, 2))
    zero = np.zeros(len(c), dtype=np.int64)
    return sum((factor[power][p] * c[:, p] * lengths ** (p - power) for p in columns), start=zero)


def _read_table(reader: Reader, where: str) -> dict[str, Any]:
    count, degree, first, last, *numbers, u = reader.column(5 + len(_NUMBERS)).tolist()
    if not (1 <= count <= MOST_SEGMENTS and 0 <= degree <= 2 and -1 <= u <= 32):
        raise ParameterError(
            f"Expected a table of 1 to {MOST_SEGMENTS} segments of degree 0 to 2 and 2^0 to 2^32 "
            f"codes, got {count} of degree {degree} and 2^{u} ({where})"
        )
    lengths = reader.column(count - 1) if u < 0 else np.full(count - 1, 1 << u, dtype=np.int64)
    c = np.empty((count, degree + 1), dtype=np.int64)
    c[0] = reader.column(degree + 1)
    changes = [reader.column(count - 1) for _ in range(degree + 1)]
    for p in range(degree, -1, -1):  # a coefficient moves by those of higher powers
        c[1:, p] = changes[p] + _moved(c[:-1], lengths, p)
        c[:, p] = np.cumsum(c[:, p])
    bounds = np.cumsum(np.concatenate(([first], lengths)))
    return {
        "bounds": bounds.tolist(),
        "last": last,
        "coefficients": c.tolist(),
        **dict(zip(_NUMBERS, numbers, strict=True)),
        "segment_shift": None if u < 0 else u,
    }
