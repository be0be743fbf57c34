"""The GRU nodes of an ONNX file replaced by those of a profile; all other nodes stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quant_gru.interchange.onnx.builder import (
    OPERATORS,
    Builder,
    Constants,
    Names,
    Value,
    names_of,
    onnx_ir,
)
from quant_gru.interchange.onnx.profiles import add_gru, zero_states
from quant_gru.interchange.onnx.source import Source


def replace_grus(
    model: Any,
    sources: Mapping[str, Source],
    profile: str,
    opset: int,
    inputs: Mapping[str, tuple[int, Sequence[int | None]]],
) -> dict[str, tuple[str, str]]:
    """Replace GRU nodes of a graph.

    Constants of the new nodes become initializers, and equal ones are one. Weights, and nodes that
    computed them, are removed if nothing else reads them.

    Args:
        model: An onnx_ir model; changed in place.
        sources: Name of an output of a GRU node -> its GRU.
        profile: See `PROFILES`.
        opset: Version of ONNX's operators for the new nodes.
        inputs: The same as in `sources` -> ONNX type of the node's input, and its sizes as far as
            they are known.

    Returns:
        The same as in `sources` -> the names of what reaches the GRU in float32: the input and the
        initial states ('' without), in the layout of the node.
    """
    made_names = Names(taken=names_of(model))
    constants: Constants = {}
    fixed: list[Any] = []
    reached = {}
    for node in list(model.graph):
        key = next((value.name for value in node.outputs if value.name in sources), None)
        if key is None:
            continue
        b = Builder(made_names, opset, constants=constants)
        new, reached[key] = _replacement(b, node, sources[key], profile, *inputs[key])
        nodes = [each for each in b.nodes if each.op_type != "Constant"]
        fixed += [each for each in b.nodes if each.op_type == "Constant"]
        read = [value for value in node.inputs if value is not None]
        names_kept = [value.name for value, _ in new]
        onnx_ir().convenience.replace_nodes_and_values(
            model.graph, node, [node], nodes, *(list(each) for each in zip(*new, strict=True))
        )
        for name, (_, value) in zip(names_kept, new, strict=True):
            value.name = name
        _remove_unread(model.graph, nodes)
        _remove_weights(model.graph, read)
    model.graph.opset_imports.update(
        {d: v for d, v in Builder(opset=opset).opset_imports.items() if d}
    )
    if profile == "operator":
        model.graph.opset_imports[OPERATORS] = 1
    for each in fixed:
        _store(model.graph, each)
    return reached


def _replacement(
    b: Builder,
    node: Any,
    source: Source,
    profile: str,
    element_type: int,
    shape: Sequence[int | None],
) -> tuple[list[tuple[Value, Value]], tuple[str, str]]:
    """Add what a node computes.

    Returns:
        Its outputs, each with the value that takes its place; and the names of what reaches it.
    """
    ir = onnx_ir()
    x, lengths, h0 = (_input(node, index) for index in (0, 4, 5))
    assert x is not None
    attributes = node.attributes
    batch_first = "layout" in attributes and attributes["layout"].as_int() == 1
    direction = attributes["direction"].as_string() if "direction" in attributes else "forward"
    reverse, D, H = direction == "reverse", source.directions, source.hidden_size
    dtype = ir.DataType(element_type)
    other = "" if dtype is ir.DataType.FLOAT else dtype.name
    data = b.cast(x, "FLOAT") if other else b.op("Identity", x)
    sizes = list(shape) if len(shape) == 3 else [None, None, source.input_size]
    data.dtype, data.shape = ir.DataType.FLOAT, ir.Shape(sizes)
    data_name = data.name
    reached = (data_name, "")
    if batch_first:
        data = b.op("Transpose", data, perm=[1, 0, 2])
        data.dtype, data.shape = ir.DataType.FLOAT, ir.Shape([sizes[1], sizes[0], sizes[2]])
    rows = None if lengths is None else b.cast(lengths, "INT64")
    if reverse:
        data = _flipped(b, data, rows)
    if h0 is None:
        before = zero_states(b, source, data)
    else:
        before = b.cast(h0, "FLOAT") if other else h0
        reached = data_name, before.name
        before = b.op("Transpose", before, perm=[1, 0, 2]) if batch_first else before
    y, h_n = add_gru(b, source, profile, data, before, rows)
    y = _flipped(b, y, rows) if reverse else y
    if batch_first:
        y = b.op("Transpose", y, perm=[1, 0, 2])
        h_n = b.op("Transpose", h_n, perm=[1, 0, 2])
    if D == 1 and not batch_first:
        y = b.op("Unsqueeze", y, b.int64([1]))
    else:
        y = b.op("Reshape", y, b.int64([0, 0, D, H]))
        y = y if batch_first else b.op("Transpose", y, perm=[0, 2, 1, 3])
    found = []
    for old, value in zip(node.outputs, (y, h_n), strict=False):
        if old.name:
            value = b.cast(value, other) if other else b.op("Identity", value)
            value.dtype, value.shape = dtype, old.shape
            found.append((old, value))
    return found, reached


def _flipped(b: Builder, v: Value, lengths: Value | None) -> Value:
    """Return a sequence (T, N, features) with the steps of each row in reverse order."""
    if lengths is None:
        ends = (b.int64([-1]), b.int64([-(2**63) + 1]), b.int64([0]), b.int64([-1]))
        found = b.op("Slice", v, *ends)
    else:
        found = b.op("ReverseSequence", v, lengths, time_axis=0, batch_axis=1)
    found.dtype, found.shape = onnx_ir().DataType.FLOAT, v.shape
    return found


def _input(node: Any, index: int) -> Value | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    return None if value is None or not value.name else value


def _remove_unread(graph: Any, nodes: Sequence[Any]) -> None:
    """Remove those of the new nodes whose outputs nothing reads."""
    for node in reversed(nodes):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            graph.remove(node, safe=True)


def _remove_weights(graph: Any, values: Sequence[Value]) -> None:
    """Remove stored tensors that nothing reads any more, and the nodes that computed them."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is not None:
            if any(each.uses() or each.is_graph_output() for each in node.outputs):
                continue
            pending += [each for each in node.inputs if each is not None]
            graph.remove(node, safe=True)
        elif value.is_initializer() and not value.is_graph_input():
            del graph.initializers[value.name]


def _store(graph: Any, node: Any) -> None:
    """Make the value of a node Constant, which is in no graph, an initializer."""
    (made,) = node.outputs
    if not made.uses():
        return
    ir, tensor = onnx_ir(), node.attributes["value"].as_tensor()
    stored = ir.Value(
        name=made.name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape),
        const_value=tensor,
    )
    graph.initializers[made.name] = stored
    ir.convenience.replace_all_uses_with(made, stored)
