"""Feeds of an ONNX model: name of an input -> array, from memory or from a file."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from quant_gru.errors import QuantGRUError

Feed = dict[str, Any]

_HELD_OUT = 5
_MOST_HELD_OUT = 16


def feeds_of(feeds: Any, proto: Any) -> Iterable[Feed]:
    """Return feeds, one after the other.

    Args:
        feeds: A dict of arrays; an iterable of such dicts; or the path of an .npz file with an
            array for each input, or with several feeds stacked along a further first axis.
        proto: The model, an `onnx.ModelProto`.

    Raises:
        QuantGRUError: There is no such file, or an input has no array.
    """
    if isinstance(feeds, str | os.PathLike):
        return _read(os.fspath(feeds), proto)
    if isinstance(feeds, Mapping):
        return [_checked(feeds, proto)]
    if not isinstance(feeds, Iterable):
        raise QuantGRUError(
            "Expected feeds to be a dict of arrays, an iterable of dicts, or the path of an .npz "
            f"file, got a {type(feeds).__name__}"
        )
    return _Checked(feeds, proto)


class _Checked:
    """Feeds that are checked as they come; as long as what they come from."""

    def __init__(self, feeds: Iterable[Any], proto: Any) -> None:
        self._feeds, self._proto = feeds, proto

    def __iter__(self) -> Iterator[Feed]:
        for feed in self._feeds:
            yield _checked(feed, self._proto)


def split(feeds: Iterable[Any], held: list[Any]) -> Iterator[Any]:
    """Yield the feeds to calibrate with; put every fifth one, at most 16, into `held` instead."""
    for index, feed in enumerate(feeds):
        if index % _HELD_OUT == _HELD_OUT - 1 and len(held) < _MOST_HELD_OUT:
            held.append(copy.deepcopy(feed))  # its arrays may be used again
        else:
            yield feed


def inputs_of(proto: Any) -> dict[str, Any]:
    """Return the inputs of a model that have no default."""
    stored = {each.name for each in proto.graph.initializer}
    return {each.name: each for each in proto.graph.input if each.name not in stored}


def _checked(feed: Any, proto: Any) -> Feed:
    """Return a feed with exactly the model's inputs, in their dtypes."""
    if not isinstance(feed, Mapping):
        raise QuantGRUError(
            f"Expected a feed to be a dict, input -> array, got a {type(feed).__name__}"
        )
    wanted = inputs_of(proto)
    optional = {each.name for each in proto.graph.input} - set(wanted)
    missing = [name for name in wanted if name not in feed]
    unknown = [name for name in feed if name not in wanted and name not in optional]
    if missing or unknown:
        raise QuantGRUError(
            f"Expected a feed for the inputs {', '.join(map(repr, wanted))}, got "
            f"{', '.join(map(repr, feed)) or 'none'}"
        )
    return {name: _array(name, value) for name, value in feed.items()}


def _array(name: str, value: Any) -> Any:
    value = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    if value.dtype == object:
        raise QuantGRUError(f"Expected the input {name!r} to be an array of numbers, got objects")
    return value


def _read(path: str, proto: Any) -> list[Feed]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError) as error:
        raise QuantGRUError(
            f"Expected feeds to be an .npz file, got {type(error).__name__}: {error} "
            f"(file {path!r})"
        ) from None
    first = _checked(arrays, proto)
    ranks = {
        name: len(each.type.tensor_type.shape.dim)
        for name, each in inputs_of(proto).items()
        if each.type.tensor_type.HasField("shape")
    }
    more = {name for name, rank in ranks.items() if np.ndim(first[name]) == rank + 1}
    if not more:
        return [first]
    counts = {name: len(first[name]) for name in first}
    if more != set(first) or len(set(counts.values())) != 1:
        raise QuantGRUError(
            "Expected feeds stacked along a first axis of the same size in every array, got "
            f"{ {name: np.shape(value) for name, value in first.items()} } (file {path!r})"
        )
    return [
        {name: value[i] for name, value in first.items()}
        for i in range(next(iter(counts.values())))
    ]
