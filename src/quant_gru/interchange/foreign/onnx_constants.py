"""Values of tensors in an ONNX model that do not depend on its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.foreign.optional import needed

# Operators that rearrange or convert weights. `_check_size` keeps their results as large as their
# inputs, so that a file cannot ask for much more memory than it has bytes for.
FOLDED = {
    "Cast",
    "Concat",
    "Constant",
    "DequantizeLinear",
    "Identity",
    "QuantizeLinear",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}
_MOST_NODES = 200

# Elements that may be computed: so many for each one that is stored, and some for small models.
_MOST_EXPANSION = 32
_FREE_ELEMENTS = 1 << 16


class Constants:
    """The constant tensors of a model's main graph.

    Args:
        model: An `onnx.ModelProto`.
        folder: Where files beside the model lie; None if the model was not read from a file.
    """

    def __init__(self, model: Any, folder: str | None) -> None:
        self._model = model
        self._folder = folder
        self._initializers = {each.name: each for each in model.graph.initializer}
        self._producers = {out: node for node in model.graph.node for out in node.output if out}

    def known(self, tensor: str) -> bool:
        """Return whether a tensor is an initializer or computed from initializers alone."""
        return all(self._reason(name) is None for name in self._ancestors(tensor))

    def value(self, tensor: str, what: str) -> np.ndarray:
        """Return the value of a tensor.

        Args:
            tensor: Its name.
            what: What it is needed for, for errors.

        Raises:
            QuantGRUError: It depends on an input, or on an operator that is not folded.
        """
        for count, name in enumerate(self._ancestors(tensor), 1):
            reason = self._reason(name)
            if reason is None and count > _MOST_NODES:
                reason = f"Expected a constant of at most {_MOST_NODES} nodes, got more"
            if reason is not None:
                raise QuantGRUError(f"{reason} ({what})")
        try:
            found = self._computed(tensor)
        except Exception as error:  # onnx raises what it likes at malformed tensors
            raise QuantGRUError(
                f"Expected a well-formed constant, got {type(error).__name__}: {str(error)[:200]} "
                f"({what})"
            ) from None
        return np.asarray(found)

    def _reason(self, name: str) -> str | None:
        """Return why a tensor is not computed from others alone that a file stores, or None."""
        if name in self._initializers:
            return None
        node = self._producers.get(name)
        if node is None:
            return f"Expected a constant, got one that depends on {name!r}"
        if node.op_type not in FOLDED or node.domain not in ("", "ai.onnx"):
            return f"Expected a constant, stored or rearranged, got the result of {node.op_type}"
        return None

    def _ancestors(self, tensor: str) -> Iterator[str]:
        """Yield a tensor and all that it is computed from."""
        seen, pending = set(), [tensor]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            yield name
            if name not in self._initializers and name in self._producers:
                pending += [each for each in self._producers[name].input if each]

    def _computed(self, tensor: str) -> np.ndarray:
        if tensor in self._initializers:
            return self._stored(self._initializers[tensor])
        names = dict.fromkeys(self._ancestors(tensor))
        stored = {name: self._initializers[name] for name in names if name in self._initializers}
        # an ONNX graph lists every node after those that it needs
        nodes = [
            node for node in self._model.graph.node if any(out in names for out in node.output)
        ]
        kept = [*stored.values(), *(_constant(node) for node in nodes if _is_constant(node))]
        left = _MOST_EXPANSION * sum(_sizes(kept).values()) + _FREE_ELEMENTS
        left -= sum(_size(each) for each in kept)
        _check_left(left)
        values = {name: self._stored(each) for name, each in stored.items()}
        for node in nodes:
            if _is_constant(node):
                values[node.output[0]] = self._stored(_constant(node))
                continue
            inputs = [values[name] if name else None for name in node.input]
            left -= _check_size(node, inputs)
            _check_left(left)
            results = self._run(node, {name: values[name] for name in node.input if name})
            values.update(zip((name for name in node.output if name), results, strict=True))
        return values[tensor]

    def _stored(self, tensor: Any) -> np.ndarray:
        """Return the value of a tensor of the file, or of a file beside it."""
        onnx = needed("onnx", "ONNX files")
        if any(size < 0 for size in tensor.dims):
            raise ValueError(f"dims {list(tensor.dims)}")
        if _location(tensor) and self._folder is None:
            raise ValueError("it is stored in another file; give the path of the model")
        return np.asarray(onnx.numpy_helper.to_array(tensor, self._folder or ""))

    def _run(self, node: Any, inputs: dict[str, np.ndarray]) -> list[Any]:
        """Return the results of a node."""
        version = next(x.version for x in self._model.opset_import if x.domain in ("", "ai.onnx"))
        # from 13 on these operators only gained options; onnx evaluates DequantizeLinear from 19 on
        opset = max(version, 19) if version >= 13 else version
        reference = needed("onnx.reference", "ONNX files")
        found = reference.ReferenceEvaluator(node, opsets={"": opset}).run(None, inputs)
        return list(found)


def _is_constant(node: Any) -> bool:
    return bool(node.op_type == "Constant")


def _constant(node: Any) -> Any:
    """Return the tensor of a node Constant."""
    onnx = needed("onnx", "ONNX files")
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value
    if attribute.name not in ("value_float", "value_floats", "value_int", "value_ints"):
        raise ValueError(f"the attribute {attribute.name!r}")
    dtype = np.float32 if "float" in attribute.name else np.int64
    return onnx.numpy_helper.from_array(np.asarray(value, dtype))


def _size(tensor: Any) -> int:
    return math.prod(tensor.dims)


def _location(tensor: Any) -> str:
    """Return the file beside the model that has a tensor's values; '' if the model has them."""
    return next((str(each.value) for each in tensor.external_data if each.key == "location"), "")


def _sizes(tensors: Sequence[Any]) -> dict[Any, int]:
    """Return the elements of each tensor; of those in one other file, the largest count alone."""
    found: dict[Any, int] = {}
    for index, tensor in enumerate(tensors):
        place = _location(tensor) or index
        found[place] = max(found.get(place, 0), _size(tensor))
    return found


def _check_left(left: int) -> None:
    if left < 0:
        raise ValueError(f"more than {_MOST_EXPANSION} times what is stored is computed from it")


def _check_size(node: Any, inputs: Sequence[np.ndarray | None]) -> int:
    """Return how many elements a node can give: no more than its inputs have, repeats included.

    Raises:
        ValueError: Its arguments would give more.
    """
    attributes = {each.name: each for each in node.attribute}
    if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        axis = attributes["axis"].i if "axis" in attributes else 1
        if not all(each is None or _fits(each, inputs[0], axis) for each in inputs[1:]):
            raise ValueError(f"scales of another shape than the values of {node.op_type}")
    if "num_outputs" in attributes and attributes["num_outputs"].i != len(node.output):
        raise ValueError("num_outputs of another number of outputs")
    if "to" in attributes and attributes["to"].i == needed("onnx", "").TensorProto.STRING:
        raise ValueError("a Cast to text")
    return sum(0 if each is None else each.size for each in inputs)


def _fits(scale: np.ndarray, values: np.ndarray | None, axis: int) -> bool:
    """Return whether scales are one, one per slice of an axis, or one per block."""
    assert values is not None
    if scale.size == 1:
        return True
    if scale.ndim == 1:
        return -values.ndim <= axis < values.ndim and values.shape[axis] == scale.size
    return scale.ndim == values.ndim and all(
        a <= b for a, b in zip(scale.shape, values.shape, strict=True)
    )
