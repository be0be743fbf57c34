"""GRU layers in the files of Keras: .keras, .weights.h5 and the older .h5."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant_gru._errors import QuantGRUError
from quant_gru.config.files import name_of
from quant_gru.export.foreign.optional import needed

_NAMES = ("kernel", "recurrent_kernel", "bias")

# A file can declare more than it stores. These limits bound the memory that it can ask for.
_MOST_ELEMENTS = 1 << 28
_MOST_EXPANSION = 16


@dataclass(frozen=True)
class Layer:
    """A GRU layer of a file.

    Attributes:
        directions: The arrays of one direction, or of forward and backward.
        config: The layer's configuration; None if the file has none.
    """

    directions: list[list[np.ndarray]]
    config: Mapping[str, Any] | None


def read_layers(path: str | os.PathLike[str]) -> dict[str, Layer]:
    """Return the GRU layers of a file by name.

    Raises:
        QuantGRUError: The file cannot be read, or h5py is missing.
    """
    name = name_of(path)
    where = f"file {name!r}"
    h5py = needed("h5py", "files of Keras")
    config: Any = None
    try:
        if zipfile.is_zipfile(name):
            with zipfile.ZipFile(name) as archive:
                config = json.loads(_unpacked(archive, "config.json"))
                source: Any = io.BytesIO(_unpacked(archive, "model.weights.h5"))
        else:
            source = name
        with h5py.File(source, "r") as file:
            if config is None and "model_config" in file.attrs:
                config = json.loads(file.attrs["model_config"])
            found: dict[str, dict[str, list[np.ndarray]]] = {}
            for layer, direction, arrays in _cells(file, h5py):
                if direction in found.setdefault(layer, {}):
                    raise QuantGRUError(
                        f"Expected one GRU of the name {layer!r}, got two ({where})"
                    )
                found[layer][direction] = arrays
    except (
        OSError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        RuntimeError,
        RecursionError,
    ) as error:
        if isinstance(error, QuantGRUError):
            raise
        raise QuantGRUError(
            f"Expected a file of Keras (.keras or .h5), got {type(error).__name__}: {error} "
            f"({where})"
        ) from None
    configs = dict(_configs(config))
    return {
        layer: Layer([parts[key] for key in sorted(parts, reverse=True)], configs.get(layer))
        for layer, parts in found.items()
    }


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive, unless it is far larger than its packed form."""
    info = archive.getinfo(name)
    if info.file_size > _MOST_EXPANSION * info.compress_size + 1024:
        raise ValueError(f"{name} of {info.file_size} bytes, packed into {info.compress_size}")
    return archive.read(info)


def _cells(file: Any, h5py: Any) -> Iterator[tuple[str, str, list[np.ndarray]]]:
    """Yield layer, direction ('forward' or 'backward') and arrays of each GRU cell."""
    groups: list[Any] = []
    file.visititems(lambda _, item: groups.append(item) if isinstance(item, h5py.Group) else None)
    for group in groups:
        sets = {
            key.partition(":")[0]: item
            for key, item in group.items()
            if isinstance(item, h5py.Dataset)
        }
        keys = _NAMES if "kernel" in sets else ("0", "1", "2")
        arrays = [sets[key] for key in keys if key in sets]
        if len(arrays) < 2 or not _is_gru([each.shape for each in arrays[:2]]):
            continue
        if max(each.size for each in arrays) > _MOST_ELEMENTS:
            raise ValueError(f"an array of more than {_MOST_ELEMENTS} numbers in {group.name}")
        parts = group.name.strip("/").split("/")
        layer, direction = _place(file, parts)
        yield layer, direction, [np.asarray(each[()]) for each in arrays]


def _is_gru(shapes: list[tuple[int, ...]]) -> bool:
    """Return whether these are a kernel (C, 3H) and a recurrent kernel (H, 3H)."""
    kernel, recurrent = shapes
    return (
        len(kernel) == len(recurrent) == 2
        and recurrent[1] == 3 * recurrent[0]
        and kernel[1] == recurrent[1]
    )


def _place(file: Any, parts: list[str]) -> tuple[str, str]:
    """Return the name of the layer and the direction of the cell in a group."""
    if parts[-1] == "vars":  # Keras 3: layers/bidirectional/forward_layer/cell/vars
        path = parts[:-1]
        path = path[:-1] if path and path[-1] == "cell" else path
        backward = path[-1:] == ["backward_layer"]
        path = path[:-1] if path[-1:] in (["forward_layer"], ["backward_layer"]) else path
        named = file.get("/".join([*path, "vars"]))
        name = None if named is None else named.attrs.get("name")
        return str(name or (path or parts)[-1]), "backward" if backward else "forward"
    path = parts[:-1] if "cell" in parts[-1] and len(parts) > 1 else parts
    last = path[-1]
    if len(path) > 1 and last.startswith(("forward_", "backward_")):
        return path[-2], last.partition("_")[0]
    return last, "forward"


def _configs(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and configuration of every layer in a model's configuration."""
    pending = [config]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            settings = item.get("config")
            if item.get("class_name") in ("GRU", "Bidirectional") and isinstance(settings, dict):
                yield str(settings.get("name")), settings
                continue
            pending.extend(item.values())
