"""Construction of ONNX graphs: nodes, shared constants, and bodies of Scan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quant_gru.errors import QuantGRUError, note_once

Value: TypeAlias = Any
"""A value of onnx_ir, which is an optional package."""
Body: TypeAlias = "Callable[[Builder, Sequence[Value], Sequence[Value]], tuple[Values, Values]]"
Values: TypeAlias = "list[Value]"
Typed: TypeAlias = "tuple[Value, str, int]"
"""A value of a Scan, its ONNX type, and the size of its last axis."""

OPSET = 21  # the first opset with INT4, and with 16-bit QuantizeLinear and DequantizeLinear
INT2_OPSET = 25
OPSETS = range(17, INT2_OPSET + 1)
MICROSOFT = "com.microsoft"
OPERATORS = "quant_gru.operators"
"""The domain of the operators of our library for ONNX Runtime."""
CONTAINERS = {"torch.int8": "INT8", "torch.uint8": "UINT8", "torch.int16": "INT16"}
CONTAINERS |= {"torch.int32": "INT32", "torch.int64": "INT64"}
Constants: TypeAlias = "dict[tuple[str, tuple[int, ...], bytes], Value]"
"""Type, shape and bytes of a constant -> its value, in one graph."""


def onnx_ir() -> Any:
    """Return the module onnx_ir.

    Raises:
        QuantGRUError: It is not installed.
    """
    try:
        import onnx_ir as ir
        import onnx_ir.passes.common
        import onnx_ir.tape
    except ImportError as error:
        raise QuantGRUError(
            f"Expected the packages of ONNX export, got an ImportError ({error}); install them "
            'with pip install "quant-gru[onnx]"'
        ) from error
    return ir


def graph_input(name: str, dtype: str, *shape: int | str) -> Value:
    """Return an input of a graph; sizes that are names are dynamic."""
    ir = onnx_ir()
    found: Value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType[dtype]), shape=ir.Shape(shape)
    )
    return found


class Names:
    """Makes the names of values: short, and unique in a model, bodies included.

    Args:
        prefix: Their start; with it they are identifiers of C, as ONNX asks for.
        taken: Names that the model has.
    """

    def __init__(self, prefix: str = "g", taken: Iterable[str] = ()) -> None:
        self._prefix, self._taken, self._count = prefix, frozenset(taken), 0

    def next(self) -> str:
        """Return a name that no value has."""
        while True:
            name = f"{self._prefix}{np.base_repr(self._count, 36).lower()}"
            self._count += 1
            if name not in self._taken:
                return name


class Builder:
    """Records the nodes of one graph. Nodes have no names: their outputs have some.

    Args:
        names: Of all values; None if the model has no others.
        opset: Version of the operators of ONNX.
        outer: The builder of the graph around a body.
        constants: Of the graph, if other builders add nodes to it, too.
    """

    def __init__(
        self,
        names: Names | None = None,
        opset: int = OPSET,
        outer: Builder | None = None,
        constants: Constants | None = None,
    ) -> None:
        self._ir = onnx_ir()
        self._tape = self._ir.tape.Tape()
        self._names, self._outer = names or Names(), outer
        self._constants: Constants = {} if constants is None else constants
        self.opset = opset

    @property
    def nodes(self) -> Sequence[Any]:
        """All nodes, in an order in which they can run."""
        found: Sequence[Any] = self._tape.nodes
        return found

    @property
    def opset_imports(self) -> dict[str, int]:
        """Domain -> version of the operators that a graph may have."""
        domains = {node.domain for node in self.nodes} & {OPERATORS}
        domains |= set() if self.opset >= OPSET else {MICROSOFT}
        return {"": self.opset, **dict.fromkeys(sorted(domains), 1)}

    @property
    def outermost(self) -> Builder:
        """The builder of the graph around all bodies."""
        return self if self._outer is None else self._outer.outermost

    def domain_of(self, dtype: str) -> str:
        """Return the domain of QuantizeLinear and DequantizeLinear for codes of an ONNX type.

        Before opset 21 ONNX's own have no 16-bit codes, and ONNX Runtime's are taken.
        """
        return MICROSOFT if "16" in dtype and self.opset < OPSET else ""

    def few_bits(self, least: int, most: int) -> tuple[Any, int] | None:
        """Return a type of 2 or 4 bits that holds these integers, and its bits; None without."""
        types = self._ir.DataType
        if self.opset >= INT2_OPSET and least >= -2 and most < 2:
            if hasattr(types, "INT2"):
                return types.INT2.numpy(), 2
            note_once(
                f"Expected an onnx_ir with INT2 for opset {self.opset}, got "
                f"{self._ir.__version__}: weights of 2 bits are stored as INT4; update onnx-ir"
            )
        if self.opset >= OPSET and least >= -8 and most < 8:
            return types.INT4.numpy(), 4
        return None

    def op(self, kind: str, *inputs: Value | None, domain: str = "", **attributes: Any) -> Value:
        """Add a node and return its only output."""
        found: Value = self._tape.op(kind, inputs, attributes=attributes, domain=domain)
        self._name([found])
        return found

    def ops(
        self, kind: str, count: int, *inputs: Value | None, domain: str = "", **attributes: Any
    ) -> Sequence[Value]:
        """Add a node and return its `count` outputs."""
        if kind == "Split" and self.opset < 18:
            attributes.pop("num_outputs", None)
        found: Sequence[Value] = self._tape.op_multi_out(
            kind, inputs, attributes=attributes, num_outputs=count, domain=domain
        )
        self._name(found)
        return found

    def _name(self, values: Sequence[Value]) -> None:
        for value in values:
            value.name = self._names.next()
            node = value.producer()
            if node is not None:
                node.name = ""

    def constant(self, value: Any, dtype: Any) -> Value:
        """Return a constant; equal constants are one. Bodies share those of the outer graph."""
        if self._outer is not None:
            return self._outer.constant(value, dtype)
        array: NDArray[Any] = np.ascontiguousarray(np.asarray(value, dtype=dtype))
        array = array.reshape(np.shape(value))
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            # onnx_ir need not find out what it is given, which takes it three times as long
            attribute = self._ir.AttrTensor("value", self._ir.Tensor(array))
            self._constants[key] = self.op("Constant", value=attribute)
        return self._constants[key]

    def float32(self, value: Any) -> Value:
        """Return a float32 constant."""
        return self.constant(value, np.float32)

    def float64(self, value: Any) -> Value:
        """Return a float64 constant."""
        return self.constant(value, np.float64)

    def int64(self, value: Any) -> Value:
        """Return an int64 constant."""
        return self.constant(value, np.int64)

    def cast(self, value: Value, dtype: str) -> Value:
        """Return `value` in the ONNX type `dtype`, such as 'DOUBLE'."""
        return self.op("Cast", value, to=int(self._ir.DataType[dtype]))

    def size(self, value: Value, axis: int) -> Value:
        """Return the size of one axis, int64 (1,); a constant if it is known."""
        known = static_size(value, axis)
        if known is not None:
            return self.int64([known])
        return self.op("Shape", value, start=axis, end=axis + 1)

    def sizes(self, *parts: Value | int) -> Value:
        """Return a shape made of sizes (1,) and numbers, int64."""
        listed = [self.int64([part]) if isinstance(part, int) else part for part in parts]
        return self.op("Concat", *listed, axis=0)

    def scan(
        self,
        body: Callable[
            [Builder, Sequence[Value], Sequence[Value]], tuple[list[Value], list[Value]]
        ],
        states: Sequence[Typed],
        inputs: Sequence[Typed],
        collects: Sequence[tuple[str, int]],
        reverse: bool,
        rows: int | None = None,
    ) -> tuple[Sequence[Value], Sequence[Value]]:
        """Add a Scan over axis 0.

        Args:
            body: Given a builder, states and one step of each input, returns new states and what
                is collected of each step.
            states: States (N, features) before the first step.
            inputs: Values (T, N, features).
            collects: ONNX type and features of what is collected.
            reverse: Whether to run from the last step to the first.
            rows: N, if it is known.

        Returns:
            States after the last step, and what was collected, (T, ..), indexed by input step.
        """
        ir, inner = self._ir, Builder(self._names, self.opset, self)
        given = [ir.Value() for _ in (*states, *inputs)]
        inner._name(given)
        after, collected = body(inner, given[: len(states)], given[len(states) :])
        # ONNX Runtime 1.23 does not infer the shapes of every body
        kinds = [(dtype, features) for _, dtype, features in (*states, *inputs, *states)]
        for value, (dtype, features) in zip(
            (*given, *after, *collected), (*kinds, *collects), strict=True
        ):
            value.dtype, value.shape = ir.DataType[dtype], ir.Shape([rows, features])
        graph = ir.Graph(given, [*after, *collected], nodes=inner.nodes, name="step")
        attributes: dict[str, Any] = {"body": graph, "num_scan_inputs": len(inputs)}
        if reverse:
            attributes["scan_input_directions"] = [1] * len(inputs)
            attributes["scan_output_directions"] = [1] * len(collected)
        found = self.ops(
            "Scan",
            len(after) + len(collected),
            *(value for value, _, _ in (*states, *inputs)),
            **attributes,
        )
        return found[: len(after)], found[len(after) :]


def names_of(model: Any) -> set[str]:
    """Return the names of all values of an onnx_ir model, subgraphs included."""
    found = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in onnx_ir().traversal.RecursiveGraphIterator(model.graph):
        found.update(value.name for value in node.outputs)
    return {name for name in found if name}


def static_size(value: Value, axis: int) -> int | None:
    """Return the size of one axis of a value, None if it is dynamic or unknown."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def ir_version(opset: int) -> int:
    """Return the version of the file format that came with an opset."""
    newest = {19: 9, 21: 10, 23: 11, 24: 12, 25: 13}
    return max((ir for first, ir in newest.items() if first <= opset), default=8)


def model_of(
    builder: Builder,
    inputs: Sequence[Value],
    outputs: Mapping[str, tuple[Value, str, Sequence[int | str]]],
) -> Any:
    """Return an onnx_ir model.

    Args:
        builder: The nodes.
        inputs: Inputs of the graph.
        outputs: Name -> value, ONNX type and shape.
    """
    ir = onnx_ir()
    for name, (value, dtype, shape) in outputs.items():
        value.name, value.dtype, value.shape = name, ir.DataType[dtype], ir.Shape(shape)
    graph = ir.Graph(
        inputs,
        [value for value, _, _ in outputs.values()],
        nodes=builder.nodes,
        opset_imports=builder.opset_imports,
        name="gru",
    )
    model = ir.Model(graph, ir_version=ir_version(builder.opset), producer_name="quant-gru")
    ir.passes.common.RemoveUnusedNodesPass()(model)
    ir.passes.common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def infer_shapes(model: Any) -> None:
    """Write the shapes of all values that ONNX can infer into an onnx_ir model."""
    onnx_ir().passes.common.ShapeInferencePass()(model)


def proto_of(model: Any) -> Any:
    """Return an onnx_ir model as protobuf, with notes of those shapes alone that a reader needs.

    Every reader infers the others, from the inputs and the nodes. What our operators give is known
    from notes alone.
    """
    proto = onnx_ir().to_proto(model)
    functions = (node for function in proto.functions for node in function.node)
    if any(node.domain == OPERATORS for node in (*proto.graph.node, *functions)):
        return proto
    stored = {tensor.name for tensor in proto.graph.initializer}
    noted = [value for value in proto.graph.value_info if value.name not in stored]
    del proto.graph.value_info[:]
    if noted:
        inferred = onnx_ir().from_proto(proto)
        infer_shapes(inferred)
        every = onnx_ir().to_proto(inferred).graph.value_info
        known = {value.name: value.type.SerializeToString() for value in every}
        needed = (v for v in noted if known.get(v.name) != v.type.SerializeToString())
        proto.graph.value_info.extend(needed)
    return proto
