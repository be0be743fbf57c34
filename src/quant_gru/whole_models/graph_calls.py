"""The calls of GRUs in the graph of a whole model: which values go in and out."""

from __future__ import annotations

from typing import Any

from quant_gru.interchange.onnx.calls import INPUTS, OUTPUTS

Calls = dict[tuple[int, int], dict[str, str]]
"""(number of the GRU, number of the call) -> x, h0, lengths, y, h_n -> name of the value."""


def calls_of(graph: Any) -> Calls:
    """Return the calls of GRUs in a graph, an `onnx.GraphProto`.

    Values that an optimizer has made constants, and outputs that nothing reads, are not in it.
    """
    calls: Calls = {}
    for node in graph.node:
        for prop in node.metadata_props:
            for kind, values in ((INPUTS, node.input), (OUTPUTS, node.output)):
                if not prop.key.startswith(f"{kind}."):
                    continue
                call, _, names = prop.value.partition("/")
                gru, _, use = call.partition(".")
                index = int(prop.key.rpartition(".")[2])
                # optimizers remove trailing outputs that nothing reads
                value = values[index] if index < len(values) else ""
                if value:
                    found = calls.setdefault((int(gru), int(use)), {})
                    found.update(dict.fromkeys(names.split(","), value))
    return calls


def with_outputs(model: Any, names: set[str]) -> Any:
    """Return a copy of an `onnx.ModelProto` that also gives these values, as far as it has them."""
    import onnx

    found = onnx.ModelProto()
    found.CopyFrom(model)
    made = {name for node in found.graph.node for name in node.output}
    known = {each.name for each in found.graph.output}
    for name in sorted((names & made) - known):
        found.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return found
