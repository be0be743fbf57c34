"""Traced models in the form that receivers take: opset 17, and half precision.

torch.onnx.export writes opset 18 and later alone.
"""

from __future__ import annotations

from typing import Any

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.builder import onnx_ir

TRACED = 18
"""The lowest opset that torch.onnx.export writes."""
_REDUCTIONS = {f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean")}
_REDUCTIONS |= {"ReduceMin", "ReduceProd", "ReduceSumSquare"}


def lower(model: Any, opset: int) -> None:
    """Rewrite the operators of opset 18 in a traced model that opset 17 has in another form.

    Args:
        model: An onnx_ir model of opset 18; changed in place.
        opset: 17; others change nothing.

    Raises:
        QuantGRUError: Opset 17 lacks an operator of the model.
    """
    if opset >= TRACED:
        return
    for node in list(onnx_ir().traversal.RecursiveGraphIterator(model.graph)):
        if node.domain:
            continue
        if node.op_type == "Split" and "num_outputs" in node.attributes:
            _split_evenly(node)
        elif node.op_type in _REDUCTIONS:
            _reduce_by_attribute(node)
        elif node.op_type == "Pad" and len(node.inputs) > 3 and node.inputs[3] is not None:
            raise _missing(node)
        node.version = opset
    model.graph.opset_imports[""] = opset


def check_opset(model: Any, opset: int) -> None:
    """Raise if a whole model has operators that its opset lacks.

    Raises:
        QuantGRUError: It has one.
    """
    if opset >= TRACED:
        return
    try:
        onnx_ir().passes.common.CheckerPass()(model)
    except Exception as error:  # of onnx.checker, which has its reason in its cause
        reason = " ".join(str(error.__cause__ or error).split())
        raise QuantGRUError(
            f"Expected a model that opset {opset} can have, got: {reason:.200}; give opset "
            f"{TRACED} or later"
        ) from error


def _missing(node: Any) -> QuantGRUError:
    return QuantGRUError(
        f"Expected a model that opset {TRACED - 1} can have, got {node.op_type} in a form of opset "
        f"{TRACED}; give opset {TRACED} or later"
    )


def _split_evenly(node: Any) -> None:
    """Without num_outputs all parts have one size."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    shape = node.inputs[0].shape
    size = None if shape is None else shape[axis]
    if not isinstance(size, int) or size % len(node.outputs):
        raise _missing(node)
    del node.attributes["num_outputs"]


def _reduce_by_attribute(node: Any) -> None:
    ir = onnx_ir()
    if "noop_with_empty_axes" in node.attributes:
        del node.attributes["noop_with_empty_axes"]
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        axes = ir.convenience.get_const_tensor(node.inputs[1])
        if axes is None:
            raise _missing(node)
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.numpy().tolist())
    node.resize_inputs(1)


def transpose_before_cast(model: Any) -> None:
    """Exchange every `Transpose` of a `Cast` to float16 with it, in an onnx_ir model.

    ONNX Runtime 1.32 ends the process when it fuses such a `Transpose` with the `MatMul` behind it.
    """
    ir = onnx_ir()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        cast = node.inputs[0].producer() if node.op_type == "Transpose" else None
        if cast is None or cast.op_type != "Cast":
            continue
        if cast.attributes["to"].as_int() != ir.DataType.FLOAT16:
            continue
        (result,), wide = node.outputs, cast.inputs[0]
        turned = ir.Node("", "Transpose", [wide], [*node.attributes.values()])
        turned.outputs[0].name = f"{result.name}_before_cast"
        turned.outputs[0].dtype, turned.outputs[0].shape = wide.dtype, result.shape
        narrow = ir.Node("", "Cast", [turned.outputs[0]], [*cast.attributes.values()])
        ir.convenience.replace_nodes_and_values(
            node.graph, node, [node], [turned, narrow], [result], [narrow.outputs[0]]
        )
        if not cast.outputs[0].uses() and not cast.outputs[0].is_graph_output():
            cast.graph.remove(cast, safe=True)
