"""The GRU nodes of an ONNX file, as `quantize_onnx` finds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.foreign.onnx_node import gru_nodes, name_of_node
from quant_gru.interchange.onnx.builder import OPSETS
from quant_gru.model_files.segments import NodeForm, graphs_of, names_read


def raised(proto: Any, where: str) -> tuple[Any, list[str]]:
    """Return a model without functions and of an opset that profiles can have, and what changed.

    Raises:
        QuantGRUError: onnx cannot raise the opset.
    """
    import onnx.inliner
    import onnx.version_converter

    found, notes = onnx.ModelProto(), []
    found.CopyFrom(proto)
    if found.functions:
        found = onnx.inliner.inline_local_functions(found)
        notes.append("functions of the file were inlined")
    opset = next((x.version for x in found.opset_import if x.domain in ("", "ai.onnx")), 0)
    least = OPSETS[0]
    if opset < least:
        try:
            found = onnx.version_converter.convert_version(found, least)
        except Exception as error:  # of C++
            raise QuantGRUError(
                f"Expected a model whose opset can be raised from {opset} to {least}, got "
                f"{type(error).__name__}: {str(error)[:300]} ({where})"
            ) from None
        notes.append(f"opset raised from {opset} to {least}")
    return found, notes


def gru_forms(proto: Any, where: str, on_error: str) -> tuple[list[NodeForm], dict[str, str]]:
    """Return the GRU nodes of a model, and those that stay float, with the reason.

    Raises:
        QuantGRUError: There is none, or one is in a branch or loop and `on_error` is 'raise'.
    """
    nested = [name_of_node(node) for node in _nested(proto.graph)]
    reason = "it is in a branch or loop of the graph; only the main graph is quantized"
    if nested and on_error == "raise":
        raise QuantGRUError(
            f"Expected GRU nodes in the main graph, got {', '.join(map(repr, nested))} in a branch "
            f"or loop; on_error='keep' leaves them in float ({where})"
        )
    nodes = gru_nodes(proto, where)
    names = [name_of_node(node) for node in nodes]
    kinds, sizes, read = *_types(proto), _read(proto)
    forms, kept = [], dict.fromkeys(nested, reason)
    for node, name in zip(nodes, names, strict=True):
        if names.count(name) > 1:
            name = next(each for each in node.output if each)
        form = _form(node, name, kinds, sizes, read)
        if form.makes:
            forms.append(form)
        else:
            kept[name] = "nothing reads its outputs"
    if not forms:
        found = sorted({str(node.op_type) for node in proto.graph.node})
        raise QuantGRUError(
            f"Expected a GRU node in the main graph, got {', '.join(found)} ({where})"
        )
    return forms, kept


def _nested(graph: Any) -> Iterator[Any]:
    """Yield the GRU nodes of all subgraphs."""
    for node in graph.node:
        for inner in graphs_of(node):
            yield from (each for each in inner.node if each.op_type == "GRU")
            yield from _nested(inner)


def _form(
    node: Any, name: str, kinds: dict[str, int], sizes: dict[str, Any], read: set[str]
) -> NodeForm:
    import onnx

    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    inputs = [*node.input, "", "", "", "", "", ""]
    outputs = [each if each in read else "" for each in (*node.output, "", "")]
    return NodeForm(
        name,
        inputs[0],
        inputs[4],
        inputs[5],
        outputs[0],
        outputs[1],
        attributes.get("direction") == b"reverse",
        attributes.get("layout", 0) == 1,
        (*inputs[1:4], *sorted(each.SerializeToString() for each in node.attribute)),
        kinds.get(inputs[0], onnx.TensorProto.FLOAT),
        sizes.get(inputs[0], ()),
    )


def _read(proto: Any) -> set[str]:
    """Return the names of all tensors that something reads."""
    found = {name for node in proto.graph.node for name in names_read(node)}
    return found | {each.name for each in proto.graph.output}


def _types(proto: Any) -> tuple[dict[str, int], dict[str, tuple[int | None, ...]]]:
    """Return element type and sizes of tensors, as far as ONNX can infer them."""
    import onnx

    try:
        proto = onnx.shape_inference.infer_shapes(proto)
    except Exception:  # of C++: what the file says is all that is known
        pass
    kinds, sizes = {}, {}
    for each in (*proto.graph.value_info, *proto.graph.output, *proto.graph.input):
        tensor = each.type.tensor_type
        if tensor.elem_type:
            kinds[each.name] = tensor.elem_type
        if tensor.HasField("shape"):
            sizes[each.name] = tuple(
                dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else None
                for dim in tensor.shape.dim
            )
    return kinds, sizes
