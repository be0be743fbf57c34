"""The file of a frozen GRU: safetensors, with the parameter document in its metadata.

The buffers and the document determine the plan. The file also contains the sums derived from them,
so that a reader need not derive any. Python derives these numbers again and compares.

The metadata `document` and the tensor `columns` are those of `parameters/packed.py`. Of each cell
there are `W` and `R` and the columns of all other integers, `integers`: the six other buffers in
the order of `BUFFERS`, then `sums_of_cell`. Files of version 1 have the whole document, and a
tensor for each number (`derived_tensors`).
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quant_gru.config.files import name_of, parse_json, write_bytes
from quant_gru.errors import ConfigError, ParameterError
from quant_gru.execution.frozen_plan import BUFFERS
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.quantizer import code_limits, container_dtype
from quant_gru.integer.tables import compact
from quant_gru.interchange.plan_tensors import derived_tensors, suffix_of, sums_of_cell
from quant_gru.parameters import document as params
from quant_gru.parameters import packed
from quant_gru.parameters.columns import Reader, column, pack_bits, packed_size, unpack_bits

FORMAT = "quant-gru-frozen"
VERSION, FIRST_VERSION = "2", "1"
_MATRICES, _ROWS = BUFFERS[:2], BUFFERS[2:]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Content:
    """What a file has.

    Attributes:
        parameters: What the parameter document says.
        batch_first: Whether the batch is the first dimension of the module's inputs.
        buffers: The integers of all cells by name; they may be missing or wrong.
        tensors: All tensors of the file by name.
        version: Of the format.
        where: The file, for messages.
    """

    parameters: params.Parameters
    batch_first: bool
    buffers: dict[str, Tensor]
    tensors: dict[str, Tensor]
    version: str
    where: str


def write(
    path: str | os.PathLike[str],
    document: Mapping[str, Any],
    batch_first: bool,
    buffers: Mapping[str, Tensor],
    plan: GRUPlan,
) -> None:
    """Write the file atomically: on failure the previous contents remain.

    Args:
        path: The file.
        document: The parameter document.
        batch_first: Whether the batch is the first dimension of the module's inputs.
        buffers: The integers of all cells by name, on the CPU.
        plan: The plan of these buffers, on the CPU.

    Raises:
        ParameterError: The file cannot be written.
    """
    try:
        write_bytes(path, to_bytes(document, batch_first, buffers, plan))
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    _logger.info("wrote a frozen GRU, version %s of the format (file %r)", VERSION, name_of(path))


@dataclass(frozen=True)
class Part:
    """A part of a file.

    Attributes:
        name: A tensor, or 'header'.
        shape: Of the tensor, as text.
        dtype: Of the tensor.
        bytes: What it takes.
    """

    name: str
    shape: str
    dtype: str
    bytes: int

    @property
    def is_of_weights(self) -> bool:
        """Whether it has weights, biases, multipliers and sums, and not parameters or tables."""
        return self.name not in ("header", "columns")


def parts_of(raw: bytes) -> list[Part]:
    """Return the parts of the bytes of a file; together they are the file.

    'columns' are tables, scales and zero points. The header has the rest of the document.
    """
    (size,) = struct.unpack("<Q", raw[:8])
    found = [Part("header", "", "", 8 + size)]
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            shape = " x ".join(map(str, entry["shape"]))
            found.append(Part(name, shape, entry["dtype"], end - begin))
    return found


def to_bytes(
    document: Mapping[str, Any], batch_first: bool, buffers: Mapping[str, Tensor], plan: GRUPlan
) -> bytes:
    """Return the bytes of the file; see `write` for the arguments."""
    short, columns = packed.pack(dict(document))
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "batch_first": json.dumps(batch_first),
        "document": json.dumps(short, separators=(",", ":")),
    }
    return with_metadata(_tensors(columns, buffers, plan), metadata)


def with_metadata(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file; the order is fixed, so that equal GRUs give equal bytes."""
    raw = save({name: tensors[name].contiguous() for name in sorted(tensors)})
    (size,) = struct.unpack("<Q", raw[:8])
    header = {"__metadata__": metadata, **json.loads(raw[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


def read(path: str | os.PathLike[str]) -> Content:
    """Read a file. What its integers mean is not checked.

    Raises:
        ParameterError: The file cannot be read, or it is not the file of a frozen GRU.
    """
    try:
        name = name_of(path)
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    where = f"file {name!r}"
    try:
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise ParameterError(f"Expected a regular file, got something else ({where})")
        with safe_open(name, framework="pt") as file:
            document, batch_first, version = _header(file.metadata() or {}, where)
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except FileNotFoundError:
        raise ParameterError(f"Expected a file to exist, got none ({where})") from None
    except OSError as error:
        raise ParameterError(f"Expected a readable file, got {error} ({where})") from None
    except (SafetensorError, AttributeError, ValueError) as error:
        if isinstance(error, ParameterError):
            raise
        hint = ""
        if zipfile.is_zipfile(name):
            hint = "; for a file of torch.save, FrozenQuantGRU.from_state_dict(torch.load(file))"
        raise ParameterError(f"Expected a safetensors file, got: {error} ({where}){hint}") from None
    if version == VERSION:
        document = params.unpacked(document, _bytes(tensors, "columns", where), where)
    parameters = params.from_document(document, where)
    buffers = _buffers(tensors, parameters, where) if version == VERSION else tensors
    _logger.info("read a frozen GRU, version %s of the format (%s)", version, where)
    return Content(parameters, batch_first, buffers, tensors, version, where)


def check(content: Content, columns: bytes, plan: GRUPlan) -> None:
    """Compare all that a file has with what its buffers and its document determine.

    Args:
        content: The file.
        columns: Those of its document, as they are written.
        plan: The plan of its buffers.

    Raises:
        ParameterError: A tensor is missing, unknown or differs.
    """
    shape = content.parameters.shape
    names = [
        name + suffix_of(layer, direction)
        for layer in range(shape.num_layers)
        for direction in range(shape.directions)
        for name in BUFFERS
    ]
    buffers = {name: content.buffers[name] for name in names}
    if content.version == FIRST_VERSION:
        expected = {**buffers, **derived_tensors(plan)}
    else:
        expected = _tensors(columns, buffers, plan)
    found, where = content.tensors, content.where
    for key, tensor in expected.items():
        if key not in found:
            raise ParameterError(f"Expected tensor {key!r}, got none ({where})")
        if found[key].dtype != tensor.dtype or not torch.equal(found[key], tensor):
            raise ParameterError(
                f"Expected tensor {key!r} to be what the document and the weights determine: "
                f"{_summary(tensor)}, got {_summary(found[key])} ({where})"
            )
    for key in found:
        if key not in expected:
            raise ParameterError(
                f"Expected no tensor but those of a frozen GRU, got {key!r:.80} ({where})"
            )


def _tensors(columns: bytes, buffers: Mapping[str, Tensor], plan: GRUPlan) -> dict[str, Tensor]:
    """Return the tensors of a file."""
    tensors = {"columns": _uint8(columns)}
    for layer, cells in enumerate(plan.cells):
        for direction, cell in enumerate(cells):
            suffix = suffix_of(layer, direction)
            for name in _MATRICES:
                tensors[name + suffix] = _packed(buffers[name + suffix], _bits(cell, name))
            parts = [column(buffers[name + suffix].numpy()) for name in _ROWS]
            parts.append(column(sums_of_cell(plan, layer, direction)))
            tensors["integers" + suffix] = _uint8(b"".join(parts))
    return tensors


def _bits(cell: CellPlan, name: str) -> int:
    return cell.weights.bits_W if name == "W" else cell.weights.bits_R


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes where they fill their containers, otherwise their bits without gaps (B,)."""
    if bits in (8, 16, 32):
        return codes
    return _uint8(pack_bits(codes.numpy().ravel(), bits))


def _buffers(
    tensors: Mapping[str, Tensor], parameters: params.Parameters, where: str
) -> dict[str, Tensor]:
    """Return the buffers of a file of version 2."""
    found: dict[str, Tensor] = {}
    H, D = parameters.shape.hidden_size, parameters.shape.directions
    for layer, directions in enumerate(parameters.cells):
        for direction, qparams in enumerate(directions):
            suffix = suffix_of(layer, direction)
            columns = {"W": D * H if layer else parameters.shape.input_size, "R": H}
            for name, K in columns.items():
                bits, key = qparams.config[f"weight.{name}"].bitwidth or 1, name + suffix
                if bits in (8, 16, 32):
                    if key in tensors:
                        found[key] = tensors[key]
                    continue
                raw = _bytes(tensors, key, where)
                if len(raw) != packed_size(3 * H * K, bits):
                    raise ParameterError(
                        f"Expected tensor {key!r} to have {3 * H * K} codes of {bits} bits in "
                        f"{packed_size(3 * H * K, bits)} bytes, got {len(raw)} ({where})"
                    )
                dtype = container_dtype(*code_limits(bits, signed=True))
                found[key] = torch.from_numpy(_codes(raw, 3 * H, K, bits)).to(dtype)
            reader = Reader(
                _bytes(tensors, f"integers{suffix}", where), f"integers{suffix}, {where}"
            )
            for name in _ROWS:
                found[name + suffix] = compact(reader.column(3 * H).tolist())
    return found


def _codes(raw: bytes, rows: int, K: int, bits: int) -> np.ndarray[Any, Any]:
    """Return codes (rows, K) of bits without gaps."""
    half = 1 << (bits - 1)
    codes = unpack_bits(raw, rows * K, bits, np.int8 if bits <= 8 else np.int32)
    return ((codes ^ half) - half).reshape(rows, K)


def _bytes(tensors: Mapping[str, Tensor], key: str, where: str) -> bytes:
    """Return the bytes of a tensor."""
    found = tensors.get(key)
    if found is None or found.dtype != torch.uint8 or found.dim() != 1:
        got = "none" if found is None else f"{found.dtype} {tuple(found.shape)}"
        raise ParameterError(f"Expected tensor {key!r} of bytes, got {got} ({where})")
    return found.numpy().tobytes()


def _uint8(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _header(metadata: Mapping[str, str], where: str) -> tuple[dict[str, Any], bool, str]:
    """Return the document, batch_first and the version."""
    if metadata.get("format") != FORMAT:
        raise ParameterError(
            f"Expected format {FORMAT!r} in the metadata, got {metadata.get('format')!r:.80} "
            f"({where})"
        )
    version = metadata.get("version")
    if version not in (FIRST_VERSION, VERSION):
        raise ParameterError(
            f"Expected version {FIRST_VERSION!r} or {VERSION!r} in the metadata, got "
            f"{version!r:.80} ({where})"
        )
    flag = metadata.get("batch_first")
    if flag not in ("true", "false"):
        raise ParameterError(
            f"Expected 'batch_first' in the metadata to be 'true' or 'false', got {flag!r:.80} "
            f"({where})"
        )
    if "document" not in metadata:
        raise ParameterError(f"Expected 'document' in the metadata, got none ({where})")
    try:
        document = parse_json(metadata["document"].encode(), f"('document', {where})")
    except ConfigError as error:
        raise ParameterError(str(error)) from None
    if not isinstance(document, dict):
        raise ParameterError(
            f"Expected 'document' to be an object, got {type(document).__name__} ({where})"
        )
    return document, flag == "true", version


def _summary(tensor: Tensor) -> str:
    values = tensor.flatten()[:8].tolist()
    more = ", .." if tensor.numel() > 8 else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} [{', '.join(map(str, values))}{more}]"
