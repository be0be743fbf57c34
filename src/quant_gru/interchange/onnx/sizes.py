"""Fixed sizes of batch and time in a traced model, for compilers that want no dynamic ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.builder import onnx_ir
from quant_gru.interchange.onnx.calls import calls_of


def fix_sizes(model: Any, sizes: Mapping[str, int | None], example: Mapping[str, Any]) -> None:
    """Replace the dynamic sizes of the batch and of time by numbers.

    Args:
        model: An onnx_ir model with nodes of `calls.call_of`; changed in place.
        sizes: 'batch' and 'time' -> size, or None for a dynamic one. It is that of the model's
            inputs, from which the sizes at its GRUs follow. If both are given, all are fixed.
        example: Name of an input -> its shape in the example, which must have these sizes.

    Raises:
        QuantGRUError: The sizes at GRUs do not follow from one size of the inputs.
    """
    ir = onnx_ir()
    bindings: dict[str, int] = {}
    for axis, (name, size) in ((1, ("batch", sizes["batch"])), (0, ("time", sizes["time"]))):
        if size is None:
            continue
        symbols: set[str] = set()
        for call in calls_of(model):
            dim = call.inputs[0].shape[axis]
            symbols |= set() if isinstance(dim, int) else dim.free_symbols()
        symbols -= bindings.keys()
        if len(symbols) > 1:
            raise QuantGRUError(
                f"Expected one size of the inputs that {name} at all GRUs follows from, got "
                f"{len(symbols)}; give dynamic_shapes in place of {name}"
            )
        bindings.update(dict.fromkeys(symbols, size))
    if None not in sizes.values():
        for value in model.graph.inputs:
            for dim, found in zip(value.shape, example[value.name], strict=True):
                if not isinstance(dim, int):
                    bindings.setdefault(dim.value, found)
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape):
            wanted = dim if isinstance(dim, int) else dim.evaluate(bindings)
            if isinstance(wanted, int) and wanted != example[value.name][axis]:
                raise QuantGRUError(
                    f"Expected an example with the size {wanted} that is fixed, got "
                    f"{example[value.name][axis]} (input {value.name!r}, axis {axis})"
                )
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    values = [*model.graph.inputs, *(value for node in nodes for value in node.outputs)]
    for value in values:
        if value.shape is not None and not value.shape.is_static():
            value.shape = value.shape.evaluate(bindings)


def fold_sizes(model: Any) -> None:
    """Replace what is computed from fixed sizes by constants."""
    from onnxscript.optimizer import optimize_ir

    optimize_ir(model, inline=False)
