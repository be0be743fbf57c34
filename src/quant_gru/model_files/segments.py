"""An ONNX model around its GRU nodes: segments that ONNX Runtime runs, GRUs that are modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from quant_gru.errors import QuantGRUError
from quant_gru.interchange.onnx.verify import run_session, session_of
from quant_gru.modules.gru import QuantGRU

Arrays = Mapping[str, Any]
"""Name of a tensor -> its array."""


class NodeForm(NamedTuple):
    """What a GRU node of a file is like besides its weights.

    Attributes:
        name: Its name, or that of its first output.
        x: Name of the input sequence.
        lengths: Name of the lengths of rows; '' without.
        h0: Name of the initial states; '' without.
        y: Name of the outputs of all steps; '' if nothing reads them.
        h_n: Name of the last states; '' if nothing reads them.
        reverse: Whether the node has direction 'reverse' alone.
        batch_first: Whether the node has `layout` 1.
        weights: What two nodes with the same weights and attributes have in common.
        element_type: ONNX type of input, states and outputs.
        shape: Sizes of the input, None for those that are not known; empty if nothing is known.
    """

    name: str
    x: str
    lengths: str
    h0: str
    y: str
    h_n: str
    reverse: bool
    batch_first: bool
    weights: tuple[Any, ...]
    element_type: int
    shape: tuple[int | None, ...]

    @property
    def dtype(self) -> Any:
        """The dtype of arrays of `element_type`."""
        import onnx

        return onnx.helper.tensor_dtype_to_np_dtype(self.element_type)

    @property
    def reads(self) -> list[str]:
        """Names of the tensors that change from call to call."""
        return [name for name in (self.x, self.lengths, self.h0) if name]

    @property
    def makes(self) -> list[str]:
        """Names of its outputs, as far as something reads them."""
        return [name for name in (self.y, self.h_n) if name]


class OnnxModel(torch.nn.Module):
    """A model of an ONNX file whose GRUs are modules; all other nodes run in ONNX Runtime.

    `forward` takes a feed, name of an input -> array, and returns the outputs in the file's order,
    tensors on the CPU. GRUs are submodules under the names of their nodes ('.' is written as '_'),
    so that `calibrate_model` and `operator_gain` work on it.

    Args:
        proto: The file, an `onnx.ModelProto`.
        nodes: The GRU nodes to replace, in the order of the file.
        grus: Name of a node -> its module; nodes with the same weights share one.
    """

    def __init__(self, proto: Any, nodes: Sequence[NodeForm], grus: Mapping[str, QuantGRU]) -> None:
        super().__init__()
        self.forms = list(nodes)
        self.outputs = [each.name for each in proto.graph.output]
        for name, gru in grus.items():
            self.add_module(module_name(name), gru)
        made = {name: node.element_type for node in nodes for name in node.makes}
        self._segments = [
            _Segment(proto, wanted, made)
            for wanted in (*(node.reads for node in nodes), self.outputs)
        ]

    def forward(self, feed: Arrays) -> tuple[Tensor, ...]:
        """Run the file.

        Args:
            feed: Name of an input -> array.

        Returns:
            The outputs, in the order of the file.
        """
        values = self.values(feed)
        return tuple(torch.as_tensor(np.asarray(values[name])) for name in self.outputs)

    def values(self, feed: Arrays) -> dict[str, Any]:
        """Return the inputs, what the GRUs read and make, and the outputs of a run, by name."""
        found: dict[str, Any] = dict(feed)
        for segment, node in zip(self._segments, self.forms, strict=False):
            found |= segment(found)
            found |= run_node(node, self.get_submodule(module_name(node.name)), found)
        return found | self._segments[-1](found)


def module_name(node: str) -> str:
    """Return the name of a node's GRU among the modules of an `OnnxModel`."""
    return node.replace(".", "_")


def run_node(node: NodeForm, gru: Any, values: Arrays) -> dict[str, Any]:
    """Return the outputs of a GRU node from a module with its weights.

    Args:
        node: The node.
        gru: The module, `batch_first` as the node has it.
        values: What the node reads.
    """
    input, hx = inputs_of(node, values)
    with torch.no_grad():
        y, h_n = gru(input, hx)
    if isinstance(y, PackedSequence):
        T = np.shape(values[node.x])[1 if node.batch_first else 0]
        y, _ = pad_packed_sequence(y, node.batch_first, total_length=T)
    if node.reverse:
        y = flipped(y, lengths_of(node, values), node.batch_first)
    D = 2 if gru.bidirectional else 1
    y = y.unflatten(-1, (D, -1))
    if not node.batch_first:
        y = y.transpose(1, 2)
    else:
        h_n = h_n.transpose(0, 1)
    found = {}
    for name, value in ((node.y, y), (node.h_n, h_n)):
        if name:
            found[name] = value.contiguous().numpy().astype(node.dtype, copy=False)
    return found


def inputs_of(node: NodeForm, values: Arrays) -> tuple[Tensor | PackedSequence, Tensor | None]:
    """Return input and initial states, as the module of a node takes them."""
    x = torch.from_numpy(np.array(values[node.x], np.float32))
    lengths = lengths_of(node, values)
    if node.reverse:
        x = flipped(x, lengths, node.batch_first)
    hx = None
    if node.h0:
        hx = torch.from_numpy(np.array(values[node.h0], np.float32))
        hx = hx.transpose(0, 1).contiguous() if node.batch_first else hx
    if lengths is None:
        return x, hx
    T = x.shape[1 if node.batch_first else 0]
    if int(lengths.min()) < 1 or int(lengths.max()) > T:
        raise QuantGRUError(
            f"Expected sequence_lens from 1 to {T}, got {int(lengths.min())} to "
            f"{int(lengths.max())} (node {node.name!r})"
        )
    return pack_padded_sequence(x, lengths, node.batch_first, enforce_sorted=False), hx


def lengths_of(node: NodeForm, values: Arrays) -> Tensor | None:
    """Return the lengths of rows that a node reads, int64 (N,); None without."""
    if not node.lengths:
        return None
    return torch.from_numpy(np.array(values[node.lengths], np.int64))


def flipped(x: Tensor, lengths: Tensor | None, batch_first: bool) -> Tensor:
    """Return a sequence with the steps of every row in reverse order; padding stays behind."""
    axis = 1 if batch_first else 0
    if lengths is None:
        return x.flip(axis)
    T = x.shape[axis]
    steps = torch.arange(T, device="cpu")[:, None]
    index = torch.where(steps < lengths, lengths - 1 - steps, steps)
    index = (index.T if batch_first else index)[..., None].expand(x.shape)
    return x.gather(axis, index)


class _Segment:
    """The part of a model that computes some tensors from inputs and from outputs of GRUs.

    Args:
        proto: The model.
        wanted: Names of the tensors.
        made: Outputs of GRUs, at which the part begins -> their ONNX types.
    """

    def __init__(self, proto: Any, wanted: Iterable[str], made: Mapping[str, int]) -> None:
        import onnx

        graph = proto.graph
        inputs = {each.name: each for each in graph.input}
        stored = {each.name: each for each in graph.initializer}
        given = set(inputs) - set(stored) | set(made)
        self._wanted = list(dict.fromkeys(wanted))
        self._constant = {
            name: onnx.numpy_helper.to_array(stored[name])
            for name in self._wanted
            if name in stored
        }
        self._computed = [
            name for name in self._wanted if name not in given and name not in self._constant
        ]
        self._session: Any = None
        self._reads: list[str] = []
        if not self._computed:
            return
        nodes, read = _needed(graph, self._computed, given)
        self._reads = [name for name in read if name in given]
        model = onnx.ModelProto()
        model.ir_version = proto.ir_version
        model.opset_import.extend(proto.opset_import)
        model.functions.extend(proto.functions)
        model.graph.name = graph.name or "segment"
        model.graph.node.extend(nodes)
        model.graph.initializer.extend(stored[name] for name in read if name in stored)
        for name in self._reads:
            info = inputs.get(name)
            if info is None:
                info = onnx.helper.make_tensor_value_info(name, made[name], None)
            model.graph.input.append(info)
        for name in self._computed:
            model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        self._session = session_of(model.SerializeToString())

    def __deepcopy__(self, memo: Any) -> _Segment:
        return self  # nothing in it changes

    def __call__(self, values: Arrays) -> dict[str, Any]:
        found = dict(self._constant)
        if self._session is not None:
            feed = {name: values[name] for name in self._reads}
            found.update(run_session(self._session, self._computed, feed))
        return found


def _needed(graph: Any, wanted: Iterable[str], given: set[str]) -> tuple[list[Any], list[str]]:
    """Return the nodes that compute tensors from given ones, and the names of all they read."""
    producers = {name: node for node in graph.node for name in node.output if name}
    pending, seen = list(wanted), dict[str, None]()
    kept = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen[name] = None
        node = None if name in given else producers.get(name)
        if node is not None:
            kept.add(id(node))
            pending += names_read(node)
    return [node for node in graph.node if id(node) in kept], list(seen)


def names_read(node: Any) -> Iterator[str]:
    """Yield the names of all tensors that a node reads, its subgraphs included."""
    yield from (name for name in node.input if name)
    for graph in graphs_of(node):
        own = {each.name for each in graph.input} | {each.name for each in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        for inner in graph.node:
            yield from (name for name in names_read(inner) if name not in own)
        yield from (each.name for each in graph.output if each.name not in own)


def graphs_of(node: Any) -> Iterator[Any]:
    """Yield the subgraphs of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
