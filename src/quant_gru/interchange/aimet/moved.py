"""Encodings of tensors that contain the values of an encoded tensor, moved but not changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from quant_gru.interchange.aimet.entries import Entry

_MOVES = frozenset(
    (
        *("Dropout", "Expand", "Flatten", "Gather", "Identity", "Reshape"),
        *("Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    )
)


def with_moved(entries: Sequence[Entry], nodes: Sequence[Any], without: Set[str]) -> list[Entry]:
    """Return entries, and those of tensors before and after operators that only move values.

    AIMET has quantizers at some of these tensors, not at others, and it switches off those that a
    file does not name, even where they are one with the quantizer of a GRU's state.

    Args:
        entries: Encodings of the tensors of GRU nodes.
        nodes: All nodes of the ONNX graph, in their order.
        without: Tensors that have no encoding, because there are several candidates.
    """
    found = {entry.name: entry for entry in entries if not entry.is_param}
    for node in reversed(nodes):
        if node.op_type in _MOVES:
            _take(found, node.input[0], [found[name] for name in node.output if name in found])
    for node in nodes:
        inputs = node.input if node.op_type == "Concat" else node.input[:1]
        if (node.op_type in _MOVES or node.op_type == "Concat") and all(i in found for i in inputs):
            for name in node.output:
                _take(found, name, [found[each] for each in inputs])
    known = {entry.name for entry in entries}
    added = (entry for name, entry in found.items() if name not in known | without)
    return [*entries, *added]


def read_tensors(graph: Any) -> set[str]:
    """Return the names of tensors that an operator reads, in subgraphs too, or the graph returns.

    AIMET removes other tensors, and refuses files that name them.
    """
    found = {each.name for each in graph.output}
    for node in graph.node:
        found |= set(node.input)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                found |= read_tensors(inner)
    return found


def _take(found: dict[str, Entry], name: str, sources: Sequence[Entry]) -> None:
    """Give a tensor the encoding of its sources if it has none and they agree."""
    renamed: Mapping[Entry, None] = dict.fromkeys(replace(each, name=name) for each in sources)
    if name and name not in found and len(renamed) == 1:
        found[name] = next(iter(renamed))
