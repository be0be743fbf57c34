"""The file of a frozen GRU: safetensors, with the parameter document in its metadata.

The buffers and the document determine the plan. The file also contains all numbers derived from
them, so that a reader needs only tensors. Python derives these numbers again and compares.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quant_gru.config.files import name_of, parse_json, write_bytes
from quant_gru.errors import ConfigError, ParameterError
from quant_gru.execution.frozen_plan import BUFFERS
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.plan_tensors import derived_tensors, suffix_of
from quant_gru.parameters.schema import Shape

FORMAT = "quant-gru-frozen"
VERSION = "1"


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
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "batch_first": json.dumps(batch_first),
        "document": json.dumps(document, separators=(",", ":")),
    }
    tensors = {**buffers, **derived_tensors(plan)}
    raw = save({name: tensors[name].contiguous() for name in sorted(tensors)})
    try:
        write_bytes(path, _with_metadata(raw, metadata))
    except ConfigError as error:
        raise ParameterError(str(error)) from None


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], bool, dict[str, Tensor], str]:
    """Read a file without checking what its tensors mean.

    Returns:
        The parameter document, batch_first, all tensors by name, and the file's name for messages.

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
            document, batch_first = _header(file.metadata() or {}, where)
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
    return document, batch_first, tensors, where


def check(tensors: Mapping[str, Tensor], shape: Shape, plan: GRUPlan, where: str) -> None:
    """Compare the derived numbers of a file with those of the plan of its buffers.

    Args:
        tensors: All tensors of the file.
        shape: The GRU that they belong to.
        plan: The plan of the buffers among them.
        where: The file, for messages.

    Raises:
        ParameterError: A tensor is missing, unknown or differs.
    """
    expected = derived_tensors(plan)
    for key, tensor in expected.items():
        found = tensors.get(key)
        if found is None:
            raise ParameterError(f"Expected tensor {key!r}, got none ({where})")
        if found.dtype != tensor.dtype or not torch.equal(found, tensor):
            raise ParameterError(
                f"Expected tensor {key!r} to be what the document and the weights determine: "
                f"{_summary(tensor)}, got {_summary(found)} ({where})"
            )
    buffers = {
        name + suffix_of(layer, direction)
        for layer in range(shape.num_layers)
        for direction in range(shape.directions)
        for name in BUFFERS
    }
    for key in tensors:
        if key not in expected and key not in buffers:
            raise ParameterError(
                f"Expected no tensor but those of a frozen GRU, got {key!r:.80} ({where})"
            )


def _with_metadata(raw: bytes, metadata: Mapping[str, str]) -> bytes:
    """Add metadata to a file; the order is fixed, so that equal GRUs give equal bytes."""
    (size,) = struct.unpack("<Q", raw[:8])
    header = {"__metadata__": metadata, **json.loads(raw[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors stay aligned
    return struct.pack("<Q", len(text)) + text + raw[8 + size :]


def _header(metadata: Mapping[str, str], where: str) -> tuple[dict[str, Any], bool]:
    """Return the document and batch_first."""
    for key, value in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(key) != value:
            raise ParameterError(
                f"Expected {key} {value!r} in the metadata, got {metadata.get(key)!r:.80} ({where})"
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
    return document, flag == "true"


def _summary(tensor: Tensor) -> str:
    values = tensor.flatten()[:8].tolist()
    more = ", .." if tensor.numel() > 8 else ""
    return f"{tensor.dtype} {tuple(tensor.shape)} [{', '.join(map(str, values))}{more}]"
