"""GRU layers in the files of Keras: .keras, .weights.h5 and the older .h5.

An HDF5 file can name bytes that are not in it: in other files of the machine, or nowhere at all.
What is read here is stored in the file itself, in full, under names that lead to it directly.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quant_gru.config.files import name_of
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.foreign.optional import needed

_NAMES = ("kernel", "recurrent_kernel", "bias")
_MOST_EXPANSION = 16  # of what a .keras file packs


@dataclass(frozen=True)
class Layer:
    """A GRU layer of a file.

    Attributes:
        directions: The arrays of one direction, or of forward and backward.
        config: The layer's configuration; None if the file has none.
    """

    directions: list[list[np.ndarray]]
    config: Mapping[str, Any] | None


def read_layers(
    path: str | os.PathLike[str], choose: Callable[[Sequence[str]], Sequence[str]]
) -> list[Layer]:
    """Return GRU layers of a file; the arrays of others are not read.

    Args:
        path: The file.
        choose: choose(names of all GRU layers) -> names of those to return.

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
        size = os.path.getsize(name) if source is name else source.getbuffer().nbytes
        with h5py.File(source, "r") as file:
            if config is None:
                config = json.loads(_attribute(file, "model_config") or "null")
            configs = dict(_configs(config))
            cells = list(_cells(file, h5py))
            return [
                Layer(_directions(cells, layer, size, where), configs.get(layer))
                for layer in choose(list(dict.fromkeys(each.layer for each in cells)))
            ]
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


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive, unless it is far larger than its packed form."""
    info = archive.getinfo(name)
    # zipfile unpacks the other methods without a limit
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} packed by another method than deflate")
    if info.file_size > _MOST_EXPANSION * info.compress_size + 1024:
        raise ValueError(f"{name} of {info.file_size} bytes, packed into {info.compress_size}")
    return archive.read(info)


@dataclass(frozen=True)
class _Cell:
    """The datasets of a GRU cell, whose contents are not read yet.

    Attributes:
        layer: Name of the layer.
        direction: 'forward' or 'backward'.
        sets: Kernel, recurrent kernel and, if there is one, bias.
    """

    layer: str
    direction: str
    sets: list[Any]


def _cells(file: Any, h5py: Any) -> Iterator[_Cell]:
    """Yield the GRU cells of a file."""
    # all of them first: what follows opens names
    for path, group in list(_groups(file, h5py)):
        keys = {key.partition(":")[0]: key for key in group}
        names = _NAMES if "kernel" in keys else ("0", "1", "2")
        if names[0] not in keys or names[1] not in keys:
            continue
        sets = [group[keys[each]] for each in names if each in keys]
        if any(not isinstance(each, h5py.Dataset) for each in sets):
            continue
        if _is_gru([each.shape for each in sets[:2]]):
            layer, direction = _place(file, path.split("/"))
            yield _Cell(layer, direction, sets)


def _groups(file: Any, h5py: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and object of each group below the root, each once.

    Raises:
        ValueError: A name leads elsewhere: to another file, or by way of another name.
    """
    seen = {h5py.h5o.get_info(file.id).addr}
    pending = [(b"", file.id)]
    while pending:
        path, group = pending.pop()
        for name in group:
            at = (path + b"/" + name).lstrip(b"/")
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                raise ValueError(f"{_text(at)!r} is a link to another name or file")
            found = h5py.h5o.get_info(group, name)
            if found.type == h5py.h5o.TYPE_GROUP and found.addr not in seen:
                seen.add(found.addr)
                pending.append((at, h5py.h5g.open(group, name)))
        if path:
            yield _text(path), h5py.Group(group)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _attribute(item: Any, name: str) -> Any:
    """Return a scalar attribute of a group or file; None if there is none.

    An array of texts may name one long text many times.
    """
    if name not in item.attrs or item.attrs.get_id(name).shape != ():
        return None
    return item.attrs[name]


def _is_gru(shapes: list[tuple[int, ...] | None]) -> bool:
    """Return whether these are a kernel (C, 3H) and a recurrent kernel (H, 3H)."""
    kernel, recurrent = shapes
    return (
        kernel is not None
        and recurrent is not None
        and len(kernel) == len(recurrent) == 2
        and recurrent[1] == 3 * recurrent[0]
        and kernel[1] == recurrent[1]
    )


def _directions(
    cells: Sequence[_Cell], layer: str, size: int, where: str
) -> list[list[np.ndarray]]:
    """Return the arrays of a layer, forward before backward.

    Args:
        cells: The cells of the file.
        layer: Name of the layer.
        size: Bytes of the file.
        where: Its name, for errors.
    """
    own = {each.direction: each for each in cells if each.layer == layer}
    if len(own) != sum(each.layer == layer for each in cells):
        raise QuantGRUError(f"Expected one GRU of the name {layer!r}, got two ({where})")
    return [[_array(each, size) for each in own[key].sets] for key in sorted(own, reverse=True)]


def _array(dataset: Any, size: int) -> np.ndarray:
    """Return the contents of a dataset that is stored in the file, in full, as it is."""
    if dataset.external or dataset.is_virtual:
        raise ValueError(f"{dataset.name!r} is stored in another file or dataset")
    if dataset.dtype.kind not in "fiu":
        raise ValueError(f"{dataset.name!r} of dtype {dataset.dtype}")
    # an unpacking filter has no limit of its own
    if dataset.id.get_create_plist().get_nfilters():
        raise ValueError(
            f"{dataset.name!r} is packed, which Keras does not do; unpack it with "
            "h5repack -f NONE packed.h5 plain.h5"
        )
    if not dataset.nbytes <= dataset.id.get_storage_size() <= size:
        raise ValueError(
            f"{dataset.name!r} of {dataset.nbytes} bytes, of which the file stores "
            f"{dataset.id.get_storage_size()}"
        )
    return np.asarray(dataset[()])


def _place(file: Any, parts: list[str]) -> tuple[str, str]:
    """Return the name of the layer and the direction of the cell in a group."""
    if parts[-1] == "vars":  # Keras 3: layers/bidirectional/forward_layer/cell/vars
        path = parts[:-1]
        path = path[:-1] if path and path[-1] == "cell" else path
        backward = path[-1:] == ["backward_layer"]
        path = path[:-1] if path[-1:] in (["forward_layer"], ["backward_layer"]) else path
        named = file.get("/".join([*path, "vars"]))
        name = None if named is None else _attribute(named, "name")
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
