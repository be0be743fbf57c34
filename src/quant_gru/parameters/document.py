"""Quantization parameters as plain data, for parameter files and checkpoints.

The document contains the configuration, every quantizer and every table, but no weights. The
document and the weights together determine every integer of the plan.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from pydantic import ValidationError
from torch import Tensor

from quant_gru.calibration.tied import one_for_input_and_state
from quant_gru.config import ACTIVATIONS, FIXED_RANGE, OPERATORS, QuantConfig
from quant_gru.config.files import name_of, parse_json, read_json, write_text
from quant_gru.config.operators import SIGMOIDS, suggest
from quant_gru.errors import (
    ConfigError,
    ParameterError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
)
from quant_gru.integer.qparams import (
    QParams,
    make_qparams,
    reciprocal_scale,
)
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table, compact
from quant_gru.parameters import packed, quant_gru_pytorch
from quant_gru.parameters.checks import (
    check_curve,
    check_fields,
    check_mean,
    check_pinned,
    check_scale,
    check_table,
    exponent_of,
)
from quant_gru.parameters.schema import (
    FORMAT,
    VERSION,
    CellParams,
    Document,
    MeanParams,
    OperatorParams,
    Shape,
    TableParams,
)

_logger = logging.getLogger(__name__)

UNTIED = (
    "Expected input.x and output.h to have one scale and zero point (tie_x_and_h true), got "
    "different ones"
)


@dataclass(frozen=True)
class Parameters:
    """The contents of a document.

    Attributes:
        shape: The shape of its GRU.
        config: The configuration of the whole GRU.
        cells: [layer][direction] -> quantization parameters.
    """

    shape: Shape
    config: QuantConfig
    cells: list[list[QParams]]


def to_document(
    shape: Shape, config: QuantConfig, cells: Sequence[Sequence[QParams]]
) -> dict[str, Any]:
    """Return the document of a calibrated GRU, as JSON-compatible data."""
    document = Document(
        format=FORMAT,
        version=VERSION,
        gru=shape,
        config=config.to_dict(),
        cells=[
            CellParams(
                layer=layer,
                reverse=direction == 1,
                operators={name: _operator(qparams, name) for name in OPERATORS},
                tables={},
                input_mean=_mean(qparams),
            )
            for layer, directions in enumerate(cells)
            for direction, qparams in enumerate(directions)
        ],
    )
    found = document.model_dump()
    # Tables of wide codes have 100 000 numbers, on which pydantic spends most of the time.
    qparams_of = [qparams for directions in cells for qparams in directions]
    for cell, qparams in zip(found["cells"], qparams_of, strict=True):
        cell["tables"] = {name: _table(qparams.tables[name]) for name in FIXED_RANGE}
    return found


def from_document(data: Any, where: str) -> Parameters:
    """Check a document and rebuild the parameters.

    Parameter files of quant-gru-pytorch are read, too.

    Args:
        data: The parsed JSON.
        where: Name of the source in errors, such as "file 'a.json'".

    Raises:
        ParameterError: A part of the document is invalid; the message names it.
    """
    if quant_gru_pytorch.is_such(data):
        return Parameters(*quant_gru_pytorch.read(data, where))
    if isinstance(data, dict) and "GRU_config" in data:
        raise ParameterError(
            f"Expected a parameter file, got a bit-width configuration; use load_bitwidth_config "
            f"({where})"
        )
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        hint = (
            "" if got else "; a file of quant-gru-pytorch has the keys 'model_info' and 'operators'"
        )
        raise ParameterError(f"Expected format to be {FORMAT!r}, got {got!r}{hint} ({where})")
    version = data.get("version")
    if version not in (1, VERSION) or isinstance(version, bool):
        raise ParameterError(f"Expected version to be 1 or {VERSION}, got {version!r} ({where})")
    try:
        document = Document.model_validate(data)
        config = QuantConfig.from_dict(document.config)
        if version == 1:
            # without means
            config = config.replace_globals(correct_bias=False)
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
    cells = [_qparams(cell, config, document, where) for cell in document.cells]
    D = shape.directions
    return Parameters(shape, config, [cells[i : i + D] for i in range(0, len(cells), D)])


def from_file(data: Any, where: str) -> Parameters:
    """Return the parameters of a file, which may be written by hand: what is doubtful warns.

    Raises:
        ParameterError: As for `from_document`.
    """
    found = from_document(data, where)
    doubts = []
    if data.get("version") == VERSION and not _names_rounding(data):
        doubts.append(
            f"Expected 'rounding' in config, got none: it is read as {found.config.rounding!r}"
        )
    if found.config.tie_x_and_h and not one_for_input_and_state(found.cells):
        doubts.append(UNTIED)
    if not found.config.correct_bias and any(q.input_mean for layer in found.cells for q in layer):
        doubts.append(
            "Expected input_mean to be null (correct_bias false), got means: they are used"
        )
    for doubt in doubts:
        warnings.warn(f"{doubt} ({where})", QuantGRUWarning, stacklevel=caller_stacklevel())
    return found


def _names_rounding(data: dict[str, Any]) -> bool:
    return "rounding" in data["config"]["GRU_config"].get("default_config", {})


def write(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write a parameter file atomically: on failure the previous contents remain."""
    write_text(path, to_text(document))
    _logger.info("wrote parameters, version %d of their format (file %r)", VERSION, name_of(path))


def to_text(document: dict[str, Any]) -> str:
    """Return the text of a parameter file."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read(path: str | os.PathLike[str]) -> Parameters:
    """Read a parameter file.

    Raises:
        ParameterError: The file cannot be read or used; the message gives the reason.
    """
    try:
        where = f"file {name_of(path)!r}"
        data = read_json(path)
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    found = from_file(data, where)
    _logger.info("read parameters, version %s of their format (%s)", data.get("version"), where)
    return found


def to_tensor(document: dict[str, Any]) -> Tensor:
    """Return a document as a uint8 tensor (its JSON text), for a state_dict."""
    text = json.dumps(document, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def to_packed_tensor(document: dict[str, Any]) -> Tensor:
    """Return a document of `to_document`, with more keys, as a uint8 tensor of few bytes.

    It is the JSON of `packed.pack`, a zero byte, and the columns.
    """
    short, columns = packed.pack(document)
    text = json.dumps(short, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text + b"\0" + columns), dtype=torch.uint8)


def columns_of(tensor: Tensor) -> bytes:
    """Return the columns in a tensor of `to_packed_tensor`."""
    return bytes(tensor.cpu().numpy()).partition(b"\0")[2]


def from_tensor(tensor: Any, where: str) -> dict[str, Any]:
    """Return the document in a tensor of `to_tensor` or `to_packed_tensor`.

    Raises:
        ParameterError: The tensor is not of this kind.
    """
    if not is_plain(tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise ParameterError(f"Expected a 1-D uint8 tensor, got something else ({where})")
    return from_bytes(bytes(tensor.cpu().numpy()), where)


def from_bytes(raw: bytes, where: str) -> dict[str, Any]:
    """Return the document in the bytes of `to_tensor` or `to_packed_tensor`.

    Raises:
        ParameterError: The bytes are not of this kind.
    """
    text, is_packed, columns = raw.partition(b"\0")
    try:
        document = parse_json(text, f"({where})")
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    if not isinstance(document, dict):
        raise ParameterError(f"Expected an object, got {type(document).__name__} ({where})")
    return unpacked(document, columns, where) if is_packed else document


def unpacked(document: dict[str, Any], columns: bytes, where: str) -> dict[str, Any]:
    """Return the document of which `packed.pack` made these.

    Raises:
        ParameterError: They are not of this kind.
    """
    try:
        return packed.unpack(document, columns, where)
    except ValidationError as error:
        raise ParameterError(_explain(error, where)) from None


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether `tensor` is a dense tensor with values, whose storage holds all elements.

    The storage of an expanded tensor does not. A copy of it could take any amount of memory.
    """
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    )


def take_flag(document: dict[str, Any], name: str, default: bool, where: str) -> bool:
    """Remove a boolean from a document and return it.

    Raises:
        ParameterError: The value is not a boolean.
    """
    value = document.pop(name, default)
    if not isinstance(value, bool):
        raise ParameterError(f"Expected {name!r} to be true or false, got {value!r} ({where})")
    return value


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


def _mean(qparams: QParams) -> MeanParams | None:
    if qparams.input_mean is None:
        return None
    values, exp2_inv = qparams.input_mean.integers()
    return MeanParams(exp2_inv=exp2_inv, values=values)


def bytes_of_table(table: Table) -> int:
    """Return the bytes of a table in the file of a frozen GRU."""
    return len(packed.table_columns(_table(table)))


def _table(table: Table) -> dict[str, Any]:
    """Return a table as `TableParams` has it."""
    return {
        "bounds": table.bounds.tolist(),
        "last": table.last,
        "coefficients": table.coefficients.tolist(),
        "shift": table.shift,
        "zero_point": table.zero_point,
        "lo": table.lo,
        "hi": table.hi,
        "segment_shift": table.segment_shift,
    }


def _check_names(cell: CellParams, place: str) -> None:
    """Raise unless a cell has exactly the known operators and tables."""
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


def _quantizer(
    operator: OperatorParams, config: QuantConfig, name: str, far: bool = False
) -> Quantizer:
    """Return the quantizer of an activation; the scale of a sigmoid is rounded to a reciprocal."""
    given = operator.scale
    if not isinstance(given, float) or operator.zero_point is None:
        raise QuantGRUError(
            f"Expected scale and zero_point to be numbers, got {given!r} and "
            f"{operator.zero_point!r}"
        )
    scale = reciprocal_scale(given, name) if name in SIGMOIDS and 0 < given < math.inf else given
    assert operator.bitwidth is not None
    zero_point = operator.zero_point
    quantizer = Quantizer(operator.bitwidth, not operator.is_unsigned, scale, zero_point, far)
    check_scale(quantizer, config, name)
    if operator.exp2_inv is not None and operator.exp2_inv != exponent_of(given):
        raise QuantGRUError(
            f"Expected scale to be 2^-exp2_inv, got {given!r} and {operator.exp2_inv}"
        )
    return quantizer


def _fields_of(name: str) -> tuple[str, ...]:
    """Return the settings that a cell has of an operator."""
    fields = ("bitwidth", "is_symmetric", "is_unsigned")
    return fields if name in ACTIVATIONS else (*fields, "granularity")


def _qparams(cell: CellParams, config: QuantConfig, document: Document, where: str) -> QParams:
    shape = document.gru
    place = f"layer {cell.layer}{', reverse' if cell.reverse else ''}, {where}"
    _check_names(cell, place)
    quantizers: dict[str, Quantizer] = {}
    pinned: dict[str, tuple[float, ...]] = {}
    rounded: set[str] = set()
    name = ""
    try:
        for name, operator in cell.operators.items():
            given = {key: getattr(operator, key) for key in _fields_of(name)}
            if any(getattr(config[name], key) != value for key, value in given.items()):
                config = config.replace(name, **given)
            check_fields(operator, name)
            if name not in ACTIVATIONS:
                if operator.scale is not None:
                    pinned[name] = check_pinned(operator.scale, config, name, shape.hidden_size)
                continue
            if operator.bitwidth is None:
                continue
            far = name == "input.x" and cell.layer == 0 and config.input_excludes_zero
            quantizers[name] = _quantizer(operator, config, name, far)
            if quantizers[name].scale != operator.scale:
                rounded.add(name)
        for name, table in cell.tables.items():
            check_table(table, quantizers, name)
            if config.activation == "exact" and name not in rounded:
                check_curve(_table_of(table, config), quantizers, name)
        tables = {
            name: _table_of(table, config)
            for name, table in cell.tables.items()
            if name not in rounded
        }
        made = make_qparams(config, quantizers, pinned, tables)
        name = "input.x"
        mean = check_mean(cell, document)
        return replace(made, zoneout=shape.zoneout, input_mean=mean)
    except (QuantGRUError, RuntimeError, OverflowError) as error:
        # errors about several operators already name the wrong one
        said = str(error)
        named = said[:-1] if "(operator '" in said else f"{said} (operator {name!r}"
        raise ParameterError(f"{named}, {place})") from None


def _table_of(table: TableParams, config: QuantConfig) -> Table:
    return Table(
        compact(table.bounds),
        table.last,
        compact(table.coefficients),
        table.shift,
        table.zero_point,
        table.lo,
        table.hi,
        table.segment_shift,
        config.rounding,
    )


def _explain(error: ValidationError, where: str) -> str:
    """Return one line per problem: the rule, the value and the place in the document."""
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
            rule = detail["msg"].removeprefix("Input should be ")
            said = f"to be {rule}"
            if rule == detail["msg"]:
                said = f"to be valid ({rule[:1].lower()}{rule[1:]})"
            lines.append(f"Expected {key!r} {said}, got {detail['input']!r:.80} ({at})")
    return "\n".join(lines)
