"""Quantization parameters as plain data: the parameter file, and what checkpoints carry.

The document holds the configuration, every quantizer and every table, but no weights: document plus
weights give the plan, integer for integer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeGuard

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from quant_gru._errors import ConfigError, ParameterError, QuantGRUError
from quant_gru.config import ACTIVATIONS, FIXED_RANGE, OPERATORS, QuantConfig
from quant_gru.config.files import name_of, parse_json, read_json, write_text
from quant_gru.config.operators import SIGMOIDS, suggest
from quant_gru.integer.qparams import (
    PRE_ACTIVATION,
    QParams,
    make_qparams,
    reciprocal_scale,
)
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table, compact, float_table

FORMAT = "quant-gru-params"
VERSION = 1

Integer = Annotated[int, Field(strict=True)]
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(_Model):
    """The GRU that parameters belong to."""

    input_size: _Size
    hidden_size: _Size
    num_layers: _Size
    bias: bool
    bidirectional: bool
    zoneout: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def directions(self) -> int:
        """1 or 2."""
        return 2 if self.bidirectional else 1


class OperatorParams(_Model):
    """One operator: real value = scale * (code - zero_point).

    A fused operator has bitwidth null and nothing else; weights have a list of scales only where
    they were set by hand (rows in PyTorch's order), otherwise null: they follow the weights.
    """

    bitwidth: Annotated[int, Field(ge=1, le=32)] | None
    is_symmetric: bool
    is_unsigned: bool
    scale: float | list[float] | None = None
    zero_point: Integer | None = None
    exp2_inv: Integer | None = Field(None, description="scale = 2^-exp2_inv; null if not such")
    granularity: Literal["tensor", "gate", "channel"] | None = None


class TableParams(_Model):
    """A piecewise polynomial: y = clamp(rne(sum c_p t^p / 2^shift) + zero_point, lo, hi)."""

    bounds: list[Integer] = Field(description="first code of each segment, ascending")
    last: Integer = Field(description="input codes are clamped to [bounds[0], last]")
    coefficients: list[list[Integer]] = Field(description="c0, c1, .. of each segment")
    shift: Annotated[int, Field(ge=0, le=62)]
    zero_point: Integer
    lo: Integer
    hi: Integer
    segment_shift: Annotated[int, Field(ge=0, le=32)] | None


class CellParams(_Model):
    """One layer and direction."""

    layer: Annotated[int, Field(ge=0)]
    reverse: bool
    operators: dict[str, OperatorParams]
    tables: dict[str, TableParams]


class Document(_Model):
    """A parameter file of quant-gru."""

    format: Literal["quant-gru-params"]
    version: Literal[1]
    gru: Shape
    config: dict[str, Any] = Field(description="as in gru_quant_bitwidth_config.json")
    cells: list[CellParams]


@dataclass(frozen=True)
class Parameters:
    """What a document says.

    Attributes:
        shape: The GRU it belongs to.
        config: The configuration of the whole GRU.
        cells: [layer][direction] -> quantization parameters.
    """

    shape: Shape
    config: QuantConfig
    cells: list[list[QParams]]


def params_json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the parameter file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Document.model_json_schema(),
        "title": "quant-gru parameter file",
    }


def to_document(
    shape: Shape, config: QuantConfig, cells: Sequence[Sequence[QParams]]
) -> dict[str, Any]:
    """The document of a calibrated GRU, as JSON-able data."""
    document = Document(
        format="quant-gru-params",
        version=1,
        gru=shape,
        config=config.to_dict(),
        cells=[
            CellParams(
                layer=layer,
                reverse=direction == 1,
                operators={name: _operator(qparams, name) for name in OPERATORS},
                tables={name: _table(qparams.tables[name]) for name in FIXED_RANGE},
            )
            for layer, directions in enumerate(cells)
            for direction, qparams in enumerate(directions)
        ],
    )
    return document.model_dump()


def from_document(data: Any, where: str) -> Parameters:
    """Check a document and rebuild the parameters.

    Args:
        data: What JSON gave.
        where: What to call the source in errors, such as "file 'a.json'".

    Raises:
        ParameterError: Anything that does not fit; the message says which.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ParameterError(f"Expected format to be {FORMAT!r}, got {got!r} ({where})")
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise ParameterError(
            f"Expected version to be {VERSION}, got {data.get('version')!r} ({where})"
        )
    try:
        document = Document.model_validate(data)
        config = QuantConfig.from_dict(document.config)
    except ValidationError as error:
        raise ParameterError(_explain(error, where)) from None
    except ConfigError as error:
        raise ParameterError(f"{error} (in config, {where})") from None
    shape = document.gru
    found = [(cell.layer, cell.reverse) for cell in document.cells]
    count = shape.num_layers * shape.directions
    if len(found) != count:
        raise ParameterError(
            f"Expected {count} cells (num_layers={shape.num_layers}, "
            f"bidirectional={shape.bidirectional}), got {len(found)} ({where})"
        )
    expected = [
        (layer, direction == 1)
        for layer in range(shape.num_layers)
        for direction in range(shape.directions)
    ]
    if found != expected:
        raise ParameterError(
            f"Expected cells of (layer, reverse) {expected}, got {found} ({where})"
        )
    cells = [_qparams(cell, config, shape, where) for cell in document.cells]
    D = shape.directions
    return Parameters(shape, config, [cells[i : i + D] for i in range(0, len(cells), D)])


def write(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a parameter file; it appears whole, or what stood there before stays."""
    write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path: str | os.PathLike[str]) -> Parameters:
    """Read a parameter file.

    Raises:
        ParameterError: The file cannot be read or used; the message says why.
    """
    try:
        where = f"file {name_of(path)!r}"
        data = read_json(path)
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    return from_document(data, where)


def to_tensor(document: dict[str, Any]) -> Tensor:
    """A document as a uint8 tensor (its JSON text), to live in a state_dict."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def from_tensor(tensor: Any, where: str) -> dict[str, Any]:
    """The document in a tensor that `to_tensor` made.

    Raises:
        ParameterError: It is not such a tensor.
    """
    if not is_plain(tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ParameterError(f"Expected a 1-D uint8 tensor, got something else ({where})")
    try:
        document = parse_json(bytes(tensor.cpu().numpy()), f"({where})")
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    if not isinstance(document, dict):
        raise ParameterError(f"Expected an object, got {type(document).__name__} ({where})")
    return document


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Whether something is a dense tensor with values."""
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta


def take_flag(document: dict[str, Any], name: str, default: bool, where: str) -> bool:
    """Take what is true or false out of a document.

    Raises:
        ParameterError: It is neither.
    """
    value = document.pop(name, default)
    if not isinstance(value, bool):
        raise ParameterError(f"Expected {name!r} to be true or false, got {value!r} ({where})")
    return value


def exponent_of(scale: float) -> int | None:
    """exp2_inv of a scale 2^-exp2_inv, None for any other."""
    mantissa, exponent = math.frexp(scale)
    return 1 - exponent if mantissa == 0.5 else None


def _operator(qparams: QParams, name: str) -> OperatorParams:
    operator = qparams.config[name]
    quantizer = qparams.quantizers.get(name)
    pinned = qparams.pinned.get(name)
    return OperatorParams(
        bitwidth=operator.bitwidth,
        is_symmetric=operator.is_symmetric,
        is_unsigned=operator.is_unsigned,
        scale=quantizer.scale if quantizer else list(pinned) if pinned else None,
        zero_point=quantizer.zero_point if quantizer else None,
        exp2_inv=exponent_of(quantizer.scale) if quantizer else None,
        granularity=operator.granularity,
    )


def _table(table: Table) -> TableParams:
    return TableParams(
        bounds=table.bounds.tolist(),
        last=table.last,
        coefficients=table.coefficients.tolist(),
        shift=table.shift,
        zero_point=table.zero_point,
        lo=table.lo,
        hi=table.hi,
        segment_shift=table.segment_shift,
    )


def _qparams(cell: CellParams, config: QuantConfig, shape: Shape, where: str) -> QParams:
    place = f"layer {cell.layer}{', reverse' if cell.reverse else ''}, {where}"
    for known, given, thing in (
        (OPERATORS, cell.operators, "operator"),
        (FIXED_RANGE, cell.tables, "table"),
    ):
        for name in given:
            if name not in known:
                raise ParameterError(
                    f"Expected a known {thing}, got {name!r}; {suggest(name, known)} ({place})"
                )
        for name in known:
            if name not in given:
                raise ParameterError(f"Expected {thing} {name!r}, got none ({place})")
    quantizers: dict[str, Quantizer] = {}
    pinned: dict[str, tuple[float, ...]] = {}
    rounded: set[str] = set()
    name = ""
    try:
        for name, operator in cell.operators.items():
            config = config.replace(
                name,
                bitwidth=operator.bitwidth,
                is_symmetric=operator.is_symmetric,
                is_unsigned=operator.is_unsigned,
                **({} if name in ACTIVATIONS else {"granularity": operator.granularity}),
            )
            _check_fields(operator, name)
            if name not in ACTIVATIONS:
                if operator.scale is not None:
                    pinned[name] = check_pinned(operator.scale, config, name, shape.hidden_size)
                continue
            if operator.bitwidth is None:
                continue
            if not isinstance(operator.scale, float) or operator.zero_point is None:
                raise QuantGRUError(
                    f"Expected scale and zero_point to be numbers, got {operator.scale!r} "
                    f"and {operator.zero_point!r}"
                )
            scale = operator.scale
            if name in SIGMOIDS and 0 < scale < math.inf:
                scale = reciprocal_scale(scale, name)
                if scale != operator.scale:
                    rounded.add(name)
            quantizers[name] = Quantizer(
                operator.bitwidth, not operator.is_unsigned, scale, operator.zero_point
            )
            check_scale(quantizers[name], config, name)
            exponent = exponent_of(operator.scale)
            if operator.exp2_inv is not None and operator.exp2_inv != exponent:
                raise QuantGRUError(
                    f"Expected scale to be 2^-exp2_inv, got {operator.scale!r} and "
                    f"{operator.exp2_inv}"
                )
        for name, table in cell.tables.items():
            _check_table(table, quantizers[PRE_ACTIVATION[name]], quantizers[name])
            if config.activation == "exact" and name not in rounded:
                _check_curve(_table_of(table), quantizers, name)
        tables = {
            name: _table_of(table) for name, table in cell.tables.items() if name not in rounded
        }
        made = make_qparams(config, quantizers, pinned, tables)
        return replace(made, zoneout=shape.zoneout)
    except (QuantGRUError, RuntimeError, OverflowError) as error:
        # what is made of several operators says itself which one is wrong
        said = str(error)
        named = said[:-1] if "(operator '" in said else f"{said} (operator {name!r}"
        raise ParameterError(f"{named}, {place})") from None


def _check_fields(operator: OperatorParams, name: str) -> None:
    """Raise if fields contradict each other, or stand where they mean nothing."""
    if name in ACTIVATIONS and operator.granularity is not None:
        raise QuantGRUError(f"Expected granularity to be null, got {operator.granularity!r}")
    if name not in ACTIVATIONS or operator.bitwidth is None:
        idle = (
            ("zero_point", "exp2_inv")
            if name not in ACTIVATIONS
            else ("scale", "zero_point", "exp2_inv")
        )
        for field in idle:
            if getattr(operator, field) is not None:
                raise QuantGRUError(
                    f"Expected {field} to be null, got {getattr(operator, field)!r}"
                )


def check_scale(quantizer: Quantizer, config: QuantConfig, name: str) -> None:
    """Raise if a quantizer breaks a rule of its configuration."""
    if config.scale_kind == "pot" and exponent_of(quantizer.scale) is None:
        raise QuantGRUError(
            f"Expected scale to be a power of two (scale_kind 'pot'), got {quantizer.scale!r}"
        )
    if config[name].is_symmetric and quantizer.zero_point != 0:
        raise QuantGRUError(f"Expected zero_point to be 0 (symmetric), got {quantizer.zero_point}")


def check_pinned(
    scale: float | Sequence[float], config: QuantConfig, name: str, hidden_size: int
) -> tuple[float, ...]:
    """Scales of a weight, one per tensor, gate or channel; raises if they break a rule."""
    scales = [scale] if isinstance(scale, float) else list(scale)
    granularity = config[name].granularity or "channel"
    expected = {"tensor": 1, "gate": 3, "channel": 3 * hidden_size}[granularity]
    if len(scales) != expected:
        raise QuantGRUError(
            f"Expected {expected} scales (granularity {granularity!r}), got {len(scales)}"
        )
    for value in scales:
        check_scale(Quantizer(config[name].bitwidth or 1, True, value), config, name)
    return tuple(scales)


def _table_of(table: TableParams) -> Table:
    return Table(
        compact(table.bounds),
        table.last,
        compact(table.coefficients),
        table.shift,
        table.zero_point,
        table.lo,
        table.hi,
        table.segment_shift,
    )


def _check_curve(table: Table, quantizers: dict[str, Quantizer], name: str) -> None:
    """Raise if a table that should be exact is far from its function: it is another's, or cut."""
    pre, out = quantizers[PRE_ACTIVATION[name]], quantizers[name]
    function = "tanh" if name == "gate.g_out" else "sigmoid"
    codes = np.unique(np.linspace(pre.lo, pre.hi, 257).astype(np.int64))
    off = np.abs(table(torch.from_numpy(codes)).numpy() - float_table(function, pre, out, codes))
    if off.max() * out.scale > 1e-3 and off.max() > 1:
        raise QuantGRUError(
            f"Expected the table to follow {function}, got one that is up to "
            f"{off.max() * out.scale:.3g} off"
        )


def _check_table(table: TableParams, pre: Quantizer, out: Quantizer) -> None:
    rows = {len(row) for row in table.coefficients}
    ok = (
        len(table.bounds) == len(table.coefficients) > 0
        and rows in ({1}, {2}, {3})
        and all(a < b for a, b in zip(table.bounds, table.bounds[1:], strict=False))
        and pre.lo <= table.bounds[0] <= table.bounds[-1] <= table.last <= pre.hi
    )
    if not ok:
        raise QuantGRUError(
            f"Expected a table of ascending bounds in [{pre.lo}, {pre.hi}] with one row of 1 to 3 "
            f"coefficients each, got {len(table.bounds)} bounds up to {table.last} and "
            f"{len(table.coefficients)} rows"
        )
    if table.zero_point != out.zero_point or not out.lo <= table.lo <= table.hi <= out.hi:
        raise QuantGRUError(
            f"Expected the table's outputs to be codes in [{out.lo}, {out.hi}] with zero point "
            f"{out.zero_point}, got [{table.lo}, {table.hi}] and {table.zero_point}"
        )
    ends = [*table.bounds[1:], table.last + 1]
    for start, end, row in zip(table.bounds, ends, table.coefficients, strict=True):
        if sum(abs(c) * (end - start) ** p for p, c in enumerate(row)) >= 1 << 62:
            raise QuantGRUError(f"Expected sums below 2^62, got coefficients {row}")
    u = table.segment_shift
    if u is not None:
        even = [table.bounds[0] + (i << u) for i in range(len(table.bounds))]
        if table.bounds != even or table.last - table.bounds[-1] >= 1 << u:
            raise QuantGRUError(
                f"Expected {len(table.bounds)} segments of 2^{u} codes up to {table.last}, "
                "got others"
            )


def _explain(error: ValidationError, where: str) -> str:
    """One line per problem: the rule, the value and the place inside the document."""
    lines = []
    for detail in error.errors(include_url=False):
        *place, key = detail["loc"] or ("document",)
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
        at = f"{at.lstrip('.')}, {where}" if at else where
        if detail["type"] == "extra_forbidden":
            lines.append(f"Expected a known key, got {key!r} ({at})")
        elif detail["type"] == "missing":
            lines.append(f"Expected key {key!r}, got none ({at})")
        else:
            rule = detail["msg"][:1].lower() + detail["msg"][1:]
            lines.append(
                f"Expected {key!r} to be valid ({rule}), got {detail['input']!r:.80} ({at})"
            )
    return "\n".join(lines)
