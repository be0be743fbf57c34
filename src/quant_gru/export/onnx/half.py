"""Graphs of half-precision models that ONNX Runtime can load.

ONNX Runtime 1.32 ends the process when it fuses a `Transpose` of a `Cast` to float16 with the
`MatMul` behind it. The same values are transposed, then cast.
"""

from __future__ import annotations

from typing import Any

from quant_gru.export.onnx.builder import onnx_ir


def transpose_before_cast(model: Any) -> None:
    """Exchange every `Transpose` of a `Cast` to float16 with it, in an onnx_ir model."""
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
