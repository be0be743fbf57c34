"""GRUs of a traced model: one node each while torch works on it, then nodes or a function.

torch.onnx.export folds and rewrites all nodes that it sees, again and again, so that it sees one
node of a GRU. A GRU of many nodes that is called more than once becomes a function of the model;
equal constants of all GRUs are one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quant_gru.interchange.onnx.builder import (
    OPERATORS,
    Builder,
    Constants,
    Names,
    Value,
    graph_input,
    names_of,
    onnx_ir,
    static_size,
)
from quant_gru.interchange.onnx.profiles import add_gru
from quant_gru.interchange.onnx.recorded import source_of

DOMAIN, CALL = "quant_gru", "Call"
INPUTS, OUTPUTS = "quant_gru.input", "quant_gru.output"
"""Metadata of nodes at the border of a GRU: 'INPUTS.<index>' -> '<gru>.<call>/<names>'."""


def call_of(x: Value, h0: Value, lengths: Value | None, gru: int, call: int) -> Any:
    """Return a node that stands for a call of a GRU; its outputs are y and h_n.

    Args:
        x: float32 (T, N, C).
        h0: float32 (layers * directions, N, H).
        lengths: int64 (N,), or None.
        gru: The number of the GRU.
        call: The number of the call among all calls of this GRU in the traced forward.
    """
    ir = onnx_ir()
    inputs = [x, h0] if lengths is None else [x, h0, lengths]
    numbers = [ir.AttrInt64("gru", gru), ir.AttrInt64("call", call)]
    return ir.Node(DOMAIN, CALL, inputs, numbers, num_outputs=2, version=1)


@dataclass(frozen=True)
class _Kind:
    """What calls have in common that one function serves: a GRU, known sizes, lengths."""

    gru: int
    T: int | None
    N: int | None
    lengths: bool


def _kind_of(call: Any) -> _Kind:
    x = call.inputs[0]
    gru = call.attributes["gru"].as_int()
    return _Kind(gru, static_size(x, 0), static_size(x, 1), len(call.inputs) == 3)


def calls_of(model: Any) -> list[Any]:
    """Return the nodes of `call_of` in a model, in order."""
    every = onnx_ir().traversal.RecursiveGraphIterator(model.graph)
    return [node for node in every if node.domain == DOMAIN and node.op_type == CALL]


def expand(model: Any, profile: str, names: Mapping[int, str]) -> None:
    """Replace the calls of GRUs in a model, and mark the values at their borders.

    Args:
        model: An onnx_ir model with nodes of `call_of`; changed in place.
        profile: See `PROFILES`.
        names: Number of a GRU -> its name in the model.
    """
    ir = onnx_ir()
    calls = calls_of(model)
    counts = Counter(map(_kind_of, calls))
    constants: Constants = {}
    made_names = Names(taken=names_of(model))
    opset = model.graph.opset_imports[""]
    borders = []
    for call in calls:
        kind = _kind_of(call)
        use = call.attributes["call"].as_int()
        inputs = dict(zip(("x", "h0", "lengths"), call.inputs, strict=False))
        if counts[kind] > 1 and profile != "float":
            name = _function(model, kind, profile, names, opset)
            nodes, outputs = [_rename(call, name)], call.outputs
        else:
            b = Builder(made_names, opset, constants=constants)
            outputs = add_gru(b, source_of(kind.gru), profile, *_padded(call.inputs))
            nodes = list(b.nodes)
            _replace(model, call, nodes, outputs)
            outputs = _without_copy(*outputs)
        borders.append(
            (f"{kind.gru}.{use}", nodes, inputs, dict(zip(("y", "h_n"), outputs, strict=True)))
        )
    model.graph.opset_imports.update(Builder(opset=opset).opset_imports, **{OPERATORS: 1})
    common = ir.passes.common
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    common.OutputFixPass()(model)
    for gru, nodes, inputs, made in borders:
        _mark(nodes, gru, inputs, made)


def _padded(inputs: Sequence[Value]) -> tuple[Value, Value, Value | None]:
    x, h0, *rest = inputs
    return x, h0, rest[0] if rest else None


def _word(name: str) -> str:
    """Return a name that ONNX takes everywhere."""
    return re.sub(r"\W", "_", name) or "gru"


def _rename(call: Any, name: str) -> Any:
    call.op_type = name
    call.attributes.clear()
    return call


def _function(model: Any, kind: _Kind, profile: str, names: Mapping[int, str], opset: int) -> str:
    """Add the function of a kind of calls, if the model has none, and return its name."""
    sizes = f"_t{kind.T}" * (kind.T is not None) + f"_n{kind.N}" * (kind.N is not None)
    name = f"{_word(names[kind.gru])}_{profile}{sizes}{'_lengths' * kind.lengths}"
    if (DOMAIN, name, "") not in model.functions:
        ir = onnx_ir()
        function = function_of(kind.gru, profile, name, opset, kind.T, kind.N, kind.lengths)
        model.functions[(DOMAIN, name, "")] = function
        ir.passes.common.RemoveUnusedNodesPass()(model)
    return name


def function_of(
    gru: int,
    profile: str,
    name: str,
    opset: int,
    T: int | None = None,
    N: int | None = None,
    lengths: bool = False,
) -> Any:
    """Return a function: x (T, N, C), h0, lengths if asked for -> y, h_n.

    Args:
        gru: The number of the GRU.
        profile: See `PROFILES`.
        name: The name of the function.
        opset: Version of ONNX's operators.
        T: Steps, or None for any.
        N: Rows, or None for any.
        lengths: Whether there is an input of lengths.
    """
    ir, b, source = onnx_ir(), Builder(opset=opset), source_of(gru)
    rows = N or "N"
    states = source.num_layers * source.directions
    x = graph_input("x", "FLOAT", T or "T", rows, source.input_size)
    h0 = graph_input("h0", "FLOAT", states, rows, source.hidden_size)
    given = [x, h0, *([graph_input("lengths", "INT64", rows)] if lengths else [])]
    outputs = add_gru(b, source, profile, *_padded(given))
    graph = ir.Graph(given, outputs, nodes=b.nodes, opset_imports=b.opset_imports, name=name)
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _replace(model: Any, call: Any, nodes: Sequence[Any], outputs: Sequence[Value]) -> None:
    """Put nodes in the place of a call; constants go to the front, where all graphs see them."""
    fixed = [node for node in nodes if node.op_type == "Constant"]
    rest = [node for node in nodes if node.op_type != "Constant"]
    front = next(iter(model.graph))
    model.graph.insert_before(front, fixed)
    onnx_ir().convenience.replace_nodes_and_values(
        call.graph, call, [call], rest, call.outputs, outputs
    )


def _without_copy(y: Value, h_n: Value) -> tuple[Value, Value]:
    """Return the outputs of a step, which are one value unless both are outputs of the graph."""
    node = h_n.producer()
    if node.op_type != "Identity" or node.inputs[0] is not y or y.is_graph_output():
        return y, h_n
    name = h_n.name if h_n.is_graph_output() else y.name
    onnx_ir().convenience.replace_all_uses_with(h_n, y, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    y.name = name
    return y, y


def _mark(
    nodes: Sequence[Any], gru: str, inputs: Mapping[str, Value], outputs: Mapping[str, Value]
) -> None:
    """Write into nodes which of their values are inputs and outputs of a GRU, for verification.

    One value may be several: the output of one step is its last state.
    """
    for node in nodes:
        for kind, values, borders in (
            (INPUTS, node.inputs, inputs),
            (OUTPUTS, node.outputs, outputs),
        ):
            for index, value in enumerate(values):
                found = [
                    key for key, each in borders.items() if value is not None and value is each
                ]
                if found:
                    node.metadata_props[f"{kind}.{index}"] = f"{gru}/{','.join(found)}"
