"""Values of tensors in an ONNX model that do not depend on its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quant_gru._errors import QuantGRUError
from quant_gru.export.foreign.optional import needed

# Operators that rearrange or convert weights. Their results are as large as their inputs, so that
# a file cannot ask for more memory than it has bytes for.
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
_MOST_ELEMENTS = 1 << 31


class Constants:
    """The constant tensors of a model's main graph.

    Args:
        model: An `onnx.ModelProto`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
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
        onnx = needed("onnx", "ONNX files")
        if tensor in self._initializers:
            return np.asarray(onnx.numpy_helper.to_array(self._initializers[tensor]))
        names = dict.fromkeys(self._ancestors(tensor))
        # an ONNX graph lists every node after those that it needs
        nodes = [
            node for node in self._model.graph.node if any(out in names for out in node.output)
        ]
        stored = [self._initializers[name] for name in names if name in self._initializers]
        size = sum(int(np.prod(each.dims)) for each in stored)
        if size << sum(node.op_type == "Concat" for node in nodes) > _MOST_ELEMENTS:
            raise ValueError("its parts are too large")
        output = onnx.helper.make_tensor_value_info(tensor, onnx.TensorProto.UNDEFINED, None)
        graph = onnx.helper.make_graph(nodes, "constant", [], [output], stored)
        version = next(x.version for x in self._model.opset_import if x.domain in ("", "ai.onnx"))
        # from 13 on these operators only gained options; onnx evaluates DequantizeLinear from 19 on
        opset = onnx.helper.make_opsetid("", max(version, 19) if version >= 13 else version)
        model = onnx.helper.make_model(graph, opset_imports=[opset])
        evaluator = needed("onnx.reference", "ONNX files").ReferenceEvaluator(model)
        return np.asarray(evaluator.run(None, {})[0])
