"""Reads the files of `check` and `diff`, and finds the documents in them.

The kind of a file follows from its first bytes, not from its name, so that pipes work, too.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant_gru.config import QuantConfig
from quant_gru.config.files import name_of, parse_json, read_bytes
from quant_gru.errors import ParameterError, QuantGRUError

if TYPE_CHECKING:
    from quant_gru.parameters.document import Parameters

STDIN = "-"
_KEYS = ("quantization", "plan")
_FLAGS = ("use_quantization", "batch_first")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_LARGEST_HEADER = 100_000_000  # of safetensors; text would be a larger number


@dataclass(frozen=True)
class Found:
    """A configuration or the parameters of one GRU.

    Attributes:
        name: Where it is in its file, such as "encoder.gru"; empty if it is the whole file.
        kind: The kind of file or module, for messages.
        content: The configuration, or the parameters.
    """

    name: str
    kind: str
    content: QuantConfig | Parameters

    @property
    def config(self) -> QuantConfig:
        """The configuration, also of parameters."""
        return self.content if isinstance(self.content, QuantConfig) else self.content.config


def read(file: str, verbose: bool = False) -> list[Found]:
    """Return all documents of a file, at least one.

    Args:
        file: Path of a configuration, a parameter file, a file of torch.save, or a safetensors
            file; "-" for standard input.
        verbose: Whether to print which operators of a configuration use their defaults.

    Raises:
        QuantGRUError: The file cannot be read, has another format, or a document in it is invalid.
    """
    where = _where(file)
    is_regular = file != STDIN and Path(name_of(file)).is_file()
    # a pipe can be read once only
    raw = None if is_regular else _read_once(file)
    first = _first_bytes(file) if raw is None else raw[:9]
    # first, because the size at the start of a safetensors file may look like that of a pickle
    if first[8:] == b"{" and int.from_bytes(first[:8], "little") <= _LARGEST_HEADER:
        with open(file, "rb") if raw is None else io.BytesIO(raw) as stream:
            return _some(_entries_of_safetensors(stream, where), where)
    if first[:4] == _ZIP or first[:1] == _PICKLE:
        return _some(_entries_of_torch(file if raw is None else io.BytesIO(raw), where), where)
    return [_json_document(read_bytes(file) if raw is None else raw, file, where, verbose)]


def is_frozen_file(file: str) -> bool:
    """Return whether a file that `read` accepts is the file of a frozen GRU."""
    first = _first_bytes(file)
    if first[8:] != b"{":
        return False
    from quant_gru.interchange.frozen_file import FORMAT

    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        metadata = parse_json(stream.read(size), "(header)").get("__metadata__")
    return isinstance(metadata, dict) and metadata.get("format") == FORMAT


def _where(file: str) -> str:
    return "standard input" if file == STDIN else f"file {file!r}"


def _read_once(file: str) -> bytes:
    return sys.stdin.buffer.read() if file == STDIN else read_bytes(file)


def _first_bytes(file: str) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(9)
    except OSError:
        return b""  # `read_bytes` raises the error


def _json_document(raw: bytes, file: str, where: str, verbose: bool) -> Found:
    """Return the configuration or the parameters in JSON text."""
    data = parse_json(raw, f"({where})")
    if isinstance(data, dict) and "format" in data:
        return _parameters("", "parameter file", data, where)
    if isinstance(data, dict) and "GRU_config" not in data:
        shown = ", ".join(sorted(data)[:5]) or "no key"
        raise QuantGRUError(
            "Expected a bit-width configuration (key GRU_config) or a parameter file (key format), "
            f"got {shown} ({where})"
        )
    name = "standard input" if file == STDIN else file
    config = QuantConfig._from_document(data, name, verbose)
    return Found("", "bit-width configuration", config)


def _some(entries: Iterator[tuple[str, str, bytes]], where: str) -> list[Found]:
    found = []
    for name, kind, raw in entries:
        place = f"{name!r}, {where}" if name else where
        from quant_gru.parameters.document import from_bytes

        found.append(_parameters(name, kind, from_bytes(raw, place), place))
    if not found:
        raise ParameterError(
            f"Expected the quantization of a calibrated QuantGRU (an entry 'quantization') or of a "
            f"FrozenQuantGRU (an entry 'plan'), got none ({where})"
        )
    return found


def _parameters(name: str, kind: str, data: Any, where: str) -> Found:
    from quant_gru.parameters import document

    if kind == "parameter file":
        return Found(name, kind, document.from_file(data, where))
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key not in _FLAGS}
    return Found(name, kind, document.from_document(data, where))


def _kind_of(key: str) -> tuple[str, str] | None:
    """Return name and kind of the module whose document has this key; None for other keys."""
    name, _, last = key.rpartition(".")
    if last not in _KEYS:
        return None
    return name, "QuantGRU" if last == "quantization" else "FrozenQuantGRU"


def _entries_of_torch(source: Any, where: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, kind and text of each document in a file of torch.save, however nested.

    Args:
        source: A path, or a stream.
        where: Name of the source in errors.
    """
    import torch

    from quant_gru.parameters.document import is_plain

    for key, value in _leaves(_loaded(source, where)):
        kind = _kind_of(key)
        if kind and is_plain(value) and value.dtype == torch.uint8 and value.dim() == 1:
            raw = bytes(value.numpy())
            if raw.startswith(b"{"):
                yield *kind, raw


def _loaded(source: Any, where: str) -> Any:
    """Return the contents of a file of torch.save, which may be damaged in any way."""
    import torch

    mapped = isinstance(source, str)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            try:
                return torch.load(source, "cpu", weights_only=True, mmap=mapped)
            except RuntimeError:
                if not mapped:
                    raise
                # files of before PyTorch 1.6 cannot be mapped
                return torch.load(source, "cpu", weights_only=True)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
                reason = "Python objects in it; save model.state_dict() instead"
            raise ParameterError(
                f"Expected a file of tensors that torch.load reads, got: {reason} ({where})"
            ) from None


def _leaves(data: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of all entries of nested dicts, each dict once."""
    # a stack, because files may nest deeper than Python's calls
    left, seen = [("", data)], set()
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            if id(value) in seen:
                continue
            seen.add(id(value))
            inner = [(f"{name}.{key}" if name else str(key), value[key]) for key in value]
            left += reversed(inner)
        else:
            yield name, value


def _entries_of_safetensors(
    stream: io.BufferedIOBase, where: str
) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, kind and text of each document among the tensors and in the metadata.

    A safetensors file is the size of its header (8 bytes, little-endian), the header as JSON, and
    the bytes of the tensors.
    """
    size = int.from_bytes(stream.read(8), "little")
    raw = stream.read(size)
    if len(raw) < size:
        raise ParameterError(f"Expected a header of {size} bytes, got {len(raw)} ({where})")
    header = parse_json(raw, f"(header, {where})")
    metadata = header.pop("__metadata__", None)
    columns = header.get("columns") if _packed(metadata) else None
    for text in metadata.values() if isinstance(metadata, dict) else ():
        if isinstance(text, str) and _is_document(text):
            raw = text.encode()
            if isinstance(columns, dict):
                raw += b"\0" + _tensor_bytes(stream, 8 + size, columns, f"'columns', {where}")
            yield "", "FrozenQuantGRU", raw
    for key, entry in header.items():
        kind = _kind_of(key)
        if kind and isinstance(entry, dict) and entry.get("dtype") == "U8":
            yield *kind, _tensor_bytes(stream, 8 + size, entry, f"{key!r}, {where}")


def _packed(metadata: Any) -> bool:
    """Return whether a frozen GRU has a part of its document in a tensor."""
    from quant_gru.interchange.frozen_file import FORMAT, VERSION

    return isinstance(metadata, dict) and (
        (metadata.get("format"), metadata.get("version")) == (FORMAT, VERSION)
    )


def _is_document(text: str) -> bool:
    from quant_gru.parameters.schema import FORMAT

    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("format") == FORMAT


def _tensor_bytes(
    stream: io.BufferedIOBase, start: int, entry: dict[str, Any], where: str
) -> bytes:
    match entry.get("data_offsets"):
        case [int(begin), int(end)] if 0 <= begin <= end:
            stream.seek(0, os.SEEK_END)
            if start + end <= stream.tell():
                stream.seek(start + begin)
                return stream.read(end - begin)
    raise ParameterError(
        f"Expected data_offsets within the file, got {entry.get('data_offsets')!r:.80} ({where})"
    )
