"""Functions for GRUs that have the same nodes and other constants, such as single steps.

The nodes of a step take more bytes than the weights of a small GRU. A file has them once: what
differs between the GRUs is passed to the function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from quant_gru.export.onnx.builder import Builder, Value, onnx_ir


class Text:
    """The nodes of a GRU: what they read is a value before them, or a constant.

    Args:
        nodes: All nodes, in order.
        given: The inputs of the GRU.
        outputs: Its outputs.

    Attributes:
        fixed: The constants among the nodes. Other GRUs may have the rest.
        nodes: All other nodes.
    """

    def __init__(
        self, nodes: Sequence[Any], given: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        self.fixed = [node for node in nodes if node.op_type == "Constant"]
        self.nodes = [node for node in nodes if node.op_type != "Constant"]
        self.given, self.outputs = list(given), list(outputs)

    def end(self) -> None:
        """Let the nodes read nothing, so that constants that no other node reads can go."""
        for node in self.nodes:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)

    def places(self) -> dict[Value, int]:
        """Return a number for each input and for each value that a node makes."""
        made = [value for node in self.nodes for value in node.outputs]
        return {value: index for index, value in enumerate([*self.given, *made])}

    def constants(self) -> list[Value]:
        """Return what comes from elsewhere, once for each use."""
        places = self.places()
        read = (value for node in self.nodes for value in node.inputs)
        return [value for value in read if value is not None and value not in places]

    def form(self) -> Any | None:
        """Return what GRUs of one function have in common; None if a node has a graph."""
        places = self.places()
        found = []
        for node in self.nodes:
            if any(str(attribute.type).endswith("GRAPH") for attribute in node.attributes.values()):
                return None
            attributes = sorted((name, repr(each.value)) for name, each in node.attributes.items())
            inputs = tuple(None if v is None else places.get(v, -1) for v in node.inputs)
            kind = (node.domain, node.op_type, len(node.outputs))
            found.append((*kind, tuple(attributes), inputs))
        return tuple(found), tuple(places[value] for value in self.outputs)


def groups(texts: Mapping[Any, Text]) -> list[list[Any]]:
    """Return the keys of texts of one form, for each form; none if there is one text alone."""
    found = defaultdict(list)
    for key, text in texts.items():
        form = text.form()
        if form is not None:
            found[form].append(key)
    return list(found.values()) if sum(map(len, found.values())) > 1 else []


def shared_function(
    domain: str, name: str, texts: Sequence[Text], opset: int
) -> tuple[Any, list[list[Value]]]:
    """Return a function of texts of one form, and what each passes to it beside its inputs.

    A constant that all have in common is in the function.

    Args:
        domain: Of the function.
        name: Of the function.
        texts: The texts.
        opset: Version of ONNX's operators.
    """
    ir, b = onnx_ir(), Builder("v", opset)
    first = texts[0]
    given = [ir.Value(name=f"x{index}") for index in range(len(first.given))]
    passed: dict[tuple[Value, ...], Value] = {}
    values = dict(zip(first.given, given, strict=True))
    uses = iter(zip(*(text.constants() for text in texts), strict=True))

    def constant() -> Value:
        each = next(uses)
        if all(value is each[0] for value in each):
            tensor = each[0].producer().attributes["value"].as_tensor()
            return b.constant(tensor.numpy(), tensor.numpy().dtype)
        if each not in passed:
            passed[each] = ir.Value(name=f"c{len(passed)}")
        return passed[each]

    for node in first.nodes:
        inputs = [
            None if value is None else values[value] if value in values else constant()
            for value in node.inputs
        ]
        attributes = {key: each.value for key, each in node.attributes.items()}
        made = b.ops(node.op_type, len(node.outputs), *inputs, domain=node.domain, **attributes)
        values.update(zip(node.outputs, made, strict=True))
    graph = ir.Graph(
        [*given, *passed.values()],
        [values[value] for value in first.outputs],
        nodes=b.nodes,
        opset_imports=b.opset_imports,
        name=name,
    )
    for node in graph:
        node.name = None  # receivers name what they inline
    function = ir.Function(domain, name, graph=graph, attributes=[])
    return function, [[values[index] for values in passed] for index in range(len(texts))]
