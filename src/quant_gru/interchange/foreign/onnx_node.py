"""GRU nodes of ONNX files: weights from the left, gates in the order z, r, h.

Only `linear_before_reset=1` is torch.nn.GRU's equation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant_gru.config.files import name_of
from quant_gru.config.operators import suggest
from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.interchange.foreign.float_gru import Cell, FloatGRU, as_float32, reset_first, stacked
from quant_gru.interchange.foreign.onnx_constants import Constants
from quant_gru.interchange.foreign.optional import needed

_ATTRIBUTES = {
    "activation_alpha",
    "activation_beta",
    "activations",
    "clip",
    "direction",
    "hidden_size",
    "layout",
    "linear_before_reset",
}
_OLDEST_OPSET = 7


def load(source: Any) -> tuple[Any, str]:
    """Return an ONNX model and its name in errors.

    Args:
        source: The path of a file, or an `onnx.ModelProto`.

    Raises:
        QuantGRUError: The file is no ONNX model, or the package onnx is missing.
    """
    onnx = needed("onnx", "ONNX files")
    if isinstance(source, onnx.ModelProto):
        return source, "the model"
    name = name_of(source)
    where = f"file {name!r}"
    try:
        # values beside the model are read where they are needed: many tensors may name the same
        model = onnx.load(name, load_external_data=False)
    except Exception as error:  # protobuf, the file system and onnx raise what they like
        raise QuantGRUError(
            f"Expected an ONNX file, got {type(error).__name__}: {str(error)[:200]} ({where})"
        ) from None
    if not model.graph.node:
        raise QuantGRUError(f"Expected an ONNX file with nodes, got none ({where})")
    return model, where


def folder_of(source: Any) -> str | None:
    """Return the folder of a model given as a path, where its other files lie; None without one."""
    return os.path.dirname(source) if isinstance(source, str | os.PathLike) else None


def name_of_node(node: Any) -> str:
    """Return the name of a node, or that of its first output if it has none."""
    return str(node.name or next((each for each in node.output if each), "?"))


def gru_nodes(model: Any, where: str) -> list[Any]:
    """Return the GRU nodes of a model's main graph, in its order."""
    versions = {each.domain: each.version for each in model.opset_import}
    opset = versions.get("", versions.get("ai.onnx"))
    if opset is None or opset < _OLDEST_OPSET:
        raise QuantGRUError(
            f"Expected a model of opset {_OLDEST_OPSET} or later, got {opset} ({where})"
        )
    return [
        node
        for node in model.graph.node
        if node.op_type == "GRU" and node.domain in ("", "ai.onnx")
    ]


def chosen_nodes(model: Any, node: str | Sequence[str] | None, where: str) -> list[Any]:
    """Return the GRU nodes of these names, or the only one.

    A node is known by its name and by the names of its outputs.

    Raises:
        QuantGRUError: There is no such node, or more than one where None was given.
    """
    nodes = gru_nodes(model, where)
    listed = ", ".join(repr(name_of_node(each)) for each in nodes)
    if not nodes:
        kinds = sorted({str(each.op_type) for each in model.graph.node})
        raise QuantGRUError(
            f"Expected a GRU node in the main graph, got {', '.join(kinds)} ({where})"
        )
    if node is None:
        if len(nodes) > 1:
            raise QuantGRUError(f"Expected node to name one of {listed}, got None ({where})")
        return nodes
    names = [node] if isinstance(node, str) else list(node)
    if not names:
        raise QuantGRUError(f"Expected at least one node, got none ({where})")
    chosen = []
    for name in names:
        found = [each for each in nodes if name and name in (each.name, *each.output)]
        if len(found) != 1:
            raise QuantGRUError(
                f"Expected the name of one GRU node, got {name!r}, which is that of {len(found)}; "
                f"{suggest(name, [name_of_node(each) for each in nodes])} ({where})"
            )
        chosen += found
    return chosen


def read(source: Any, node: str | Sequence[str] | None, reverse: bool) -> FloatGRU:
    """Return the GRU of one node, or of several as its layers.

    Args:
        source: The path of a file, or an `onnx.ModelProto`.
        node: Name of the node or of its output; names from the lowest to the highest layer; None
            if there is one GRU node.
        reverse: Whether to accept nodes of direction 'reverse', as forward GRUs of flipped inputs.

    Raises:
        QuantGRUError: The node is missing, computes something else, or its weights are no
            constants.
    """
    model, where = load(source)
    nodes = chosen_nodes(model, node, where)
    constants = Constants(model, folder_of(source))
    layers = [read_node(each, constants, reverse, where) for each in nodes]
    return stacked(layers, [f"node {name_of_node(each)!r}" for each in nodes])


def read_node(node: Any, constants: Constants, reverse: bool, where: str) -> FloatGRU:
    """Return the GRU of one node."""
    at = f"node {name_of_node(node)!r}, {where}"
    attributes = _attributes(node, at)
    directions = _check_direction(attributes, reverse, at)
    layout = attributes.get("layout", 0)
    if layout not in (0, 1):
        raise QuantGRUError(f"Expected layout to be 0 or 1, got {layout!r} ({at})")
    inputs = [*node.input, "", "", "", "", "", ""]
    found = {
        name: _weight(constants, inputs[index], name, at) for index, name in ((1, "W"), (2, "R"))
    }
    H = found["R"].shape[2]
    biases = _weight(constants, inputs[3], "B", at) if inputs[3] else None
    shapes = {
        "W": (directions, 3 * H, found["W"].shape[2]),
        "R": (directions, 3 * H, H),
        "B": (directions, 6 * H),
    }
    for name, value in (*found.items(), ("B", biases)):
        if value is not None and (value.shape != shapes[name] or 0 in value.shape):
            raise QuantGRUError(
                f"Expected {name} to be of shape {shapes[name]}, got {value.shape} ({at})"
            )
    if attributes.get("hidden_size", H) != H:
        raise QuantGRUError(
            f"Expected hidden_size to be {H}, as R has it, got {attributes['hidden_size']} ({at})"
        )
    _warn_of_initial_state(constants, inputs[5], at)
    cells = []
    for d in range(directions):
        bw, br = (None, None) if biases is None else np.split(biases[d], 2)
        cells.append(
            Cell(
                reset_first(found["W"][d]),
                reset_first(found["R"][d]),
                None if bw is None else reset_first(bw),
                None if br is None else reset_first(br),
            )
        )
    return FloatGRU((tuple(cells),), batch_first=layout == 1)


def _attributes(node: Any, at: str) -> dict[str, Any]:
    """Return the attributes; raise if one of them changes what the GRU computes."""
    onnx = needed("onnx", "ONNX files")
    found: dict[str, Any] = {}
    for each in node.attribute:
        if each.name not in _ATTRIBUTES:
            raise QuantGRUError(
                f"Expected an attribute of GRU, got {each.name!r}; "
                f"{suggest(each.name, _ATTRIBUTES)} ({at})"
            )
        found[each.name] = onnx.helper.get_attribute_value(each)
    linear = found.get("linear_before_reset", 0)
    if linear != 1:
        raise QuantGRUError(
            f"Expected linear_before_reset to be 1, got {linear}: with "
            "0 the reset gate multiplies the state before the product with R, and torch.nn.GRU "
            f"multiplies after it ({at})"
        )
    if "clip" in found:
        raise QuantGRUError(
            f"Expected no clip, which torch.nn.GRU does not have, got {found['clip']} ({at})"
        )
    for name in ("activation_alpha", "activation_beta"):
        if found.get(name):
            raise QuantGRUError(
                f"Expected no {name} (Sigmoid and Tanh have none), got {list(found[name])} ({at})"
            )
    return found


def _check_direction(attributes: Mapping[str, Any], reverse: bool, at: str) -> int:
    """Return the number of directions; check them and the activations."""
    direction = _text(attributes.get("direction", b"forward"))
    if direction == "reverse" and not reverse:
        raise QuantGRUError(
            "Expected direction to be 'forward' or 'bidirectional', got 'reverse'; reverse=True "
            f"returns a forward GRU, for inputs and outputs that are flipped in time ({at})"
        )
    if direction not in ("forward", "bidirectional", "reverse"):
        raise QuantGRUError(
            f"Expected direction to be forward, bidirectional or reverse, got {direction!r} ({at})"
        )
    directions = 2 if direction == "bidirectional" else 1
    given = [_text(each).lower() for each in attributes.get("activations", ())]
    if given and given != ["sigmoid", "tanh"] * directions:
        raise QuantGRUError(
            f"Expected activations to be {['Sigmoid', 'Tanh'] * directions}, got {given} ({at})"
        )
    return directions


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _weight(constants: Constants, tensor: str, name: str, at: str) -> np.ndarray:
    """Return an input of the node as a float32 array; raise if it is no constant."""
    if not tensor:
        raise QuantGRUError(f"Expected the input {name}, got none ({at})")
    value = constants.value(tensor, f"{name}, {at}")
    dimensions = 2 if name == "B" else 3
    if value.dtype.kind != "f" and value.dtype.name != "bfloat16":
        raise QuantGRUError(f"Expected {name} to be of a float dtype, got {value.dtype} ({at})")
    if value.ndim != dimensions:
        raise QuantGRUError(
            f"Expected {name} to have {dimensions} dimensions, got shape {value.shape} ({at})"
        )
    return as_float32(value, f"{name} ({at})")


def _warn_of_initial_state(constants: Constants, tensor: str, at: str) -> None:
    """Warn if the node has an initial state that is constant and not zero."""
    if not tensor or not constants.known(tensor):
        return
    kind = "a constant other than zero"
    try:
        if not np.any(constants.value(tensor, at) != 0):
            return
    except QuantGRUError:
        # the state is no part of the result
        kind = "a constant that cannot be computed here"
    warnings.warn(
        f"initial_h is {kind}: give it as hx to every call ({at})",
        QuantGRUWarning,
        stacklevel=caller_stacklevel(),
    )
