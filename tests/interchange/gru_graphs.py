"""ONNX graphs with GRU nodes, as other tools write them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KINDS = {np.dtype("float32"): TensorProto.FLOAT, np.dtype("float64"): TensorProto.DOUBLE}
KINDS[np.dtype("float16")] = TensorProto.FLOAT16


class Graph:
    """A graph that grows node by node; `model` returns it.

    Args:
        seed: Of the weights.
        opset: Version of the operators.
        dtype: Of all values.
    """

    def __init__(self, seed=0, opset=17, dtype="float32"):
        self.random = np.random.default_rng(seed)
        self.opset, self.dtype = opset, np.dtype(dtype)
        self.nodes, self.stored, self.inputs, self.outputs = [], [], [], []

    def store(self, name, value):
        self.stored.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, name, shape, kind=None):
        kind = KINDS[self.dtype] if kind is None else kind
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name, kind=None):
        kind = KINDS[self.dtype] if kind is None else kind
        self.outputs.append(helper.make_tensor_value_info(name, kind, None))

    def add(self, op, inputs, outputs, **attributes):
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))
        return outputs[0]

    def gru(
        self,
        x,
        C,
        H,
        name="gru",
        direction="forward",
        layout=0,
        bias=True,
        lengths="",
        h0="",
        outputs=("Y", "Y_h"),
        weights=None,
        linear_before_reset=1,
        **attributes,
    ):
        """Add a GRU node; its outputs are '<name>_Y' and '<name>_Y_h', '' where not wanted."""
        D = 2 if direction == "bidirectional" else 1
        inputs = [x, *(weights or self.weights(name, C, H, D, bias)), lengths, h0]
        while inputs[-1] == "":
            inputs.pop()
        if layout:
            attributes["layout"] = 1
        made = [f"{name}_{each}" if each in outputs else "" for each in ("Y", "Y_h")]
        node = helper.make_node(
            "GRU",
            inputs,
            made,
            name=name,
            hidden_size=H,
            direction=direction,
            linear_before_reset=linear_before_reset,
            **attributes,
        )
        self.nodes.append(node)
        return made

    def weights(self, name, C, H, D, bias=True):
        def part(what, *shape):
            value = self.random.uniform(-1, 1, shape) * 1.5 / np.sqrt(H)
            return self.store(f"{name}_{what}", value.astype(self.dtype))

        W, R = part("W", D, 3 * H, C), part("R", D, 3 * H, H)
        return [W, R, part("B", D, 6 * H) if bias else ""]

    def model(self):
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.stored)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        model.producer_name = "another tool"
        helper.set_model_props(model, {"task": "test"})
        known = onnx.shape_inference.infer_shapes(model).graph.output
        del model.graph.output[:]
        model.graph.output.extend(known)
        onnx.checker.check_model(model)
        return model

    def normal(self, *shape):
        return self.random.standard_normal(shape).astype(self.dtype)


def two_grus(seed=0, shared=False):
    """Two GRU(5, 5) in a row, and six feeds."""
    graph = Graph(seed)
    x = graph.input("x", ["T", "N", 5])
    weights = graph.weights("both", 5, 5, 1) if shared else None
    first, _ = graph.gru(x, 5, 5, "first", outputs=("Y",), weights=weights)
    graph.store("axis", np.array([1]))
    between = graph.add("Squeeze", [first, "axis"], ["between"])
    second, last = graph.gru(between, 5, 5, "second", weights=weights)
    graph.output(second)
    graph.output(last)
    return graph.model(), [{"x": graph.normal(9, 2, 5)} for _ in range(6)]
