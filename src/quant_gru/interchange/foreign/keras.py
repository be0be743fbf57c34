"""Weights of Keras' GRU layer: they multiply from the right, with gates in the order z, r, h.

Only `reset_after=True` is torch.nn.GRU's equation: the reset gate multiplies the product with the
recurrent weights. With `reset_after=False` it multiplies the state before that product.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant_gru.config.operators import suggest
from quant_gru.errors import QuantGRUError
from quant_gru.interchange.foreign.float_gru import Cell, FloatGRU, array, cell_of_columns, stacked
from quant_gru.interchange.foreign.haste import checked_directions
from quant_gru.interchange.foreign.keras_file import Layer, read_layers

_RESET_BEFORE = (
    "reset_after=False multiplies the state by the reset gate before the product with the "
    "recurrent weights, and torch.nn.GRU multiplies after it"
)

_RULES = {"activation": "tanh", "recurrent_activation": "sigmoid", "reset_after": True}


def read(weights: Any, layer: str | Sequence[str] | None) -> FloatGRU:
    """Return the GRU of Keras' weights, whose inputs have the batch first.

    Args:
        weights: The result of a layer's `get_weights()`, or a sequence of one per layer; or the
            path of a .keras or .h5 file.
        layer: Name of a layer in a file, or names from the lowest to the highest. None if the file
            has one GRU.

    Raises:
        QuantGRUError: The weights are no GRU's, or of one that computes something else.
    """
    if isinstance(weights, str | os.PathLike):
        return _from_file(weights, layer)
    if layer is not None:
        raise QuantGRUError(f"Expected layer only beside a file, got {layer!r}")
    if not isinstance(weights, Sequence) or not weights:
        raise QuantGRUError(
            "Expected the list of get_weights(), a list of such lists or the path of a file, got "
            f"{type(weights).__name__}"
        )
    first = weights[0]
    # a layer is a list of arrays, and an array may be a list of rows
    if isinstance(first, list | tuple) and (not first or getattr(first[0], "ndim", 1) != 1):
        names = [f"layer {index}" for index in range(len(weights))]
        layers = [_layer(each, f"{n}: ") for each, n in zip(weights, names, strict=True)]
        return stacked(layers, names)
    return _layer(weights, "")


def _from_file(path: str | os.PathLike[str], layer: str | Sequence[str] | None) -> FloatGRU:
    where = f"file {os.fspath(path)!r}"
    names: list[str] = []

    def choose(known: Sequence[str]) -> Sequence[str]:
        names.extend(_chosen(known, layer, where))
        return names

    layers = [
        _checked(found, f"layer {name!r}, {where}")
        for found, name in zip(read_layers(path, choose), names, strict=True)
    ]
    return stacked(layers, [repr(name) for name in names])


def _chosen(known: Sequence[str], layer: str | Sequence[str] | None, where: str) -> list[str]:
    """Return the names of the layers to read; raise if one is unknown."""
    if layer is None:
        if len(known) != 1:
            raise QuantGRUError(
                f"Expected layer to name one of {', '.join(map(repr, sorted(known))) or 'no GRU'}, "
                f"got None ({where})"
            )
        return list(known)
    names = [layer] if isinstance(layer, str) else list(layer)
    for name in names:
        if name not in known:
            raise QuantGRUError(
                f"Expected a GRU layer, got {name!r}; {suggest(name, known)} ({where})"
            )
    if not names:
        raise QuantGRUError(f"Expected at least one layer, got none ({where})")
    return names


def _checked(layer: Layer, where: str) -> FloatGRU:
    if layer.config is not None:
        _check_config(layer.config, len(layer.directions) == 2, where)
    return _layer([each for direction in layer.directions for each in direction], f"{where}: ")


def _check_config(config: Mapping[str, Any], bidirectional: bool, where: str) -> None:
    """Raise unless a layer's configuration is that of torch.nn.GRU's equations."""
    inner: list[Any] = [config]
    if bidirectional:
        both = (config.get("layer"), config.get("backward_layer"))
        inner = [each["config"] for each in both if isinstance(each, dict) and "config" in each]
    for index, settings in enumerate(inner):
        check_settings(settings, where)
        got = settings.get("go_backwards", index == 1)
        if got != (index == 1):
            raise QuantGRUError(
                f"Expected go_backwards to be {index == 1!r}, got {got!r} ({where})"
            )
    if bidirectional and config.get("merge_mode", "concat") != "concat":
        raise QuantGRUError(
            f"Expected merge_mode to be 'concat', got {config['merge_mode']!r} ({where})"
        )


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Raise unless the configuration of a GRU layer or cell is that of torch.nn.GRU's equations."""
    for name, expected in _RULES.items():
        got = settings.get(name, expected)
        if got != expected:
            reason = f": {_RESET_BEFORE}" if name == "reset_after" else ""
            raise QuantGRUError(
                f"Expected {name} to be {expected!r}, got {got!r} ({where}){reason}"
            )


def _layer(weights: Any, where: str) -> FloatGRU:
    """Return the GRU of one layer's arrays: 2 or 3, or 4 or 6 for both directions."""
    if not isinstance(weights, Sequence) or len(weights) not in (2, 3, 4, 6):
        count = len(weights) if isinstance(weights, Sequence) else type(weights).__name__
        raise QuantGRUError(
            f"{where}Expected kernel, recurrent_kernel and bias, once or for two directions, "
            f"got {count} array(s)"
        )
    per = 3 if len(weights) % 3 == 0 else 2
    parts = [weights[start : start + per] for start in range(0, len(weights), per)]
    ends = ("",) if len(parts) == 1 else ("forward ", "backward ")
    cells = tuple(_cell(part, where + end) for part, end in zip(parts, ends, strict=True))
    layer = checked_directions(cells, where.removesuffix(": ") or "the layer")
    return FloatGRU(layer.cells, batch_first=True)


def _cell(arrays: Sequence[Any], where: str) -> Cell:
    kernel = array(arrays[0], f"{where}kernel", 2)
    recurrent = array(arrays[1], f"{where}recurrent_kernel", 2)
    if len(arrays) == 2:
        return cell_of_columns(kernel, recurrent, None, None, where)
    H = recurrent.shape[0]
    if np.shape(arrays[2]) == (3 * H,):
        raise QuantGRUError(
            f"{where}Expected bias to be of shape (2, {3 * H}), got ({3 * H},), the shape with "
            f"reset_after=False: {_RESET_BEFORE}"
        )
    bias = array(arrays[2], f"{where}bias", 2)
    if bias.shape != (2, 3 * H):
        raise QuantGRUError(f"{where}Expected bias to be of shape (2, {3 * H}), got {bias.shape}")
    return cell_of_columns(kernel, recurrent, bias[0], bias[1], where)
