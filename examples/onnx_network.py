"""A published ONNX file as a PyTorch module whose GRUs can be quantized.

    network = OnnxNetwork("model.onnx")
    quantized = calibrate_model(convert_model(network, "int8_wide"), batches)

Every GRU node is a QuantGRU, read by `QuantGRU.from_onnx`. All other nodes run in PyTorch, one
after the other. What depends on shapes alone stays in numpy, so that exporters see constants.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx.helper import get_attribute_value
from onnx.numpy_helper import to_array
from torch import Tensor, nn
from torch.nn import functional as F

from quant_gru import QuantGRU

Attributes = dict[str, Any]
Operator = Callable[..., Tensor]


class OnnxNetwork(nn.Module):
    """A network that an ONNX file describes.

    Args:
        path: The file.

    Attributes:
        inputs: Names of the inputs, in the order of `forward`'s arguments.
        outputs: Names of the outputs, in the order of its results.
        grus: The GRU nodes by name, a "." in a name replaced by "_".
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        model = onnx.load(os.fspath(path))
        graph = model.graph
        constants = {each.name: to_array(each) for each in graph.initializer}
        self.inputs = [each.name for each in graph.input if each.name not in constants]
        self.outputs = [each.name for each in graph.output]
        self.grus = nn.ModuleDict()
        self.weights = nn.ParameterList()
        self._constants: dict[str, np.ndarray] = {}
        self._weight_of: dict[str, int] = {}
        self._nodes: list[tuple[onnx.NodeProto, Attributes, str]] = []
        for node in graph.node:
            attributes = {each.name: get_attribute_value(each) for each in node.attribute}
            if node.op_type == "Constant":
                constants[node.output[0]] = to_array(attributes["value"])
                continue
            name = ""
            if node.op_type == "GRU":
                name = (node.name or node.output[0]).replace(".", "_")
                self.grus[name] = _gru(model, node)
                _refuse(node, "lengths", any(node.input[4:5]))
            known = name or node.op_type in _OPERATORS or node.op_type in _OF_SHAPES
            _refuse(node, "the computation", not known)
            for attribute, plain in _PLAIN.items():
                _refuse(node, attribute, attributes.get(attribute, plain) != plain)
            pads = node.op_type == "MaxPool" and any(attributes.get("pads", []))
            _refuse(node, "pads", pads)
            self._nodes.append((node, attributes, name))
        in_grus = {i for node in graph.node if node.op_type == "GRU" for i in node.input[1:4]}
        for name, value in constants.items():
            if value.dtype == np.float32 and name not in in_grus:
                self._weight_of[name] = len(self.weights)
                self.weights.append(nn.Parameter(torch.tensor(value), requires_grad=False))
            elif name not in in_grus:
                self._constants[name] = value

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the outputs from the inputs, both in the order of the file."""
        values: dict[str, Any] = dict(zip(self.inputs, inputs, strict=True))
        values |= self._constants
        values |= {name: self.weights[i] for name, i in self._weight_of.items()}
        values[""] = None
        for node, attributes, name in self._nodes:
            if node.op_type == "Shape":
                values[node.output[0]] = np.array(values[node.input[0]].shape, dtype=object)
            elif node.op_type == "GRU":
                x, state = node.input[0], (*node.input, "", "", "")[5]
                found = _run_gru(self.grus[name], values[x], values[state])
                values.update(zip(node.output, found, strict=False))
            else:
                given = [values[each] for each in node.input]
                of_shapes = not any(isinstance(each, Tensor) for each in given)
                operators = _OF_SHAPES if of_shapes else _OPERATORS
                values[node.output[0]] = operators[node.op_type](attributes, *given)
        found = tuple(values[name] for name in self.outputs)
        return found[0] if len(found) == 1 else found


def _refuse(node: onnx.NodeProto, what: str, really: bool) -> None:
    """Raise an error that names what a node has and this module does not compute."""
    if really:
        raise NotImplementedError(f"{what} of {node.op_type} (node {node.name!r})")


def _gru(model: onnx.ModelProto, node: onnx.NodeProto) -> QuantGRU:
    """The GRU of a node; its initial state comes with each call."""
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    for each in alone.graph.node:
        if each.op_type == "GRU" and len(each.input) > 5:
            each.input[5] = ""
    return QuantGRU.from_onnx(alone, node.name or node.output[0])


def _run_gru(gru: nn.Module, x: Tensor, state: Any) -> tuple[Tensor, Tensor]:
    """Y (T, D, N, H) and Y_h (D, N, H) of an input (T, N, C) and a state (D, N, H) or None."""
    y, h = gru(x, None if state is None else _tensor(state))
    return y.unflatten(2, (h.shape[0], -1)).transpose(1, 2), h


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _conv(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    spatial = x.dim() - 2
    begin, end = _pads(a, spatial)
    x = F.pad(x, [p for pair in zip(begin[::-1], end[::-1], strict=True) for p in pair])
    run = (F.conv1d, F.conv2d)[spatial - 1]
    ones = [1] * spatial
    return run(
        x,
        weight,
        bias,
        a.get("strides", ones),
        0,
        a.get("dilations", ones),
        a.get("group", 1),
    )


def _conv_transpose(a: Attributes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    begin, end = _pads(a, 2)
    assert begin == end
    return F.conv_transpose2d(
        x,
        weight,
        bias,
        a.get("strides", [1, 1]),
        begin,
        a.get("output_padding", [0, 0]),
        a.get("group", 1),
        a.get("dilations", [1, 1]),
    )


def _pads(a: Attributes, spatial: int) -> tuple[list[int], list[int]]:
    pads = list(a.get("pads", [0] * (2 * spatial)))
    return pads[:spatial], pads[spatial:]


def _pad(a: Attributes, x: Tensor, pads: Any = None, value: Any = None) -> Tensor:
    both = np.asarray(a["pads"] if pads is None else pads).reshape(2, -1)[:, ::-1].T
    return F.pad(x, both.ravel().tolist(), value=0.0 if value is None else float(value))


def _slice(
    _: Attributes, x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Tensor:
    parts = _parts(x.dim(), starts, ends, axes, steps)
    for axis, part in enumerate(parts):
        if part.step is not None and part.step < 0:  # which PyTorch does not take
            x = x.index_select(axis, torch.tensor(list(range(x.shape[axis])[part])))
            parts[axis] = slice(None)
    return x[tuple(parts)]


def _parts(dimensions: int, starts: Any, ends: Any, axes: Any, steps: Any) -> list[slice]:
    """The part of each dimension that Slice takes."""
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    parts = [slice(None)] * dimensions
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        parts[axis] = slice(int(start), int(end), int(step))
    return parts


def _gather(a: Attributes, x: Tensor, index: Any) -> Tensor:
    axis, index = a.get("axis", 0) % x.dim(), torch.tensor(index)
    picked = x.index_select(axis, index.flatten() % x.shape[axis])
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _scatter(_: Attributes, x: Tensor, index: Any, updates: Tensor) -> Tensor:
    index = torch.tensor(index)
    return x.index_put(tuple(index.unbind(-1)), updates)


def _gemm(a: Attributes, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    product = (x.T if a.get("transA") else x) @ (y.T if a.get("transB") else y)
    return a.get("alpha", 1.0) * product + (0 if bias is None else a.get("beta", 1.0) * bias)


def _axes(a: Attributes, axes: Any) -> list[int]:
    return [int(axis) for axis in (a["axes"] if axes is None else axes)]


def _unsqueeze(a: Attributes, x: Tensor, axes: Any = None) -> Tensor:
    for axis in sorted(_axes(a, axes)):
        x = x.unsqueeze(axis)
    return x


def _squeeze(a: Attributes, x: Tensor, axes: Any = None) -> Tensor:
    if axes is None and "axes" not in a:
        return x.squeeze()
    return x.squeeze(tuple(_axes(a, axes)))


def _reshape(_: Attributes, x: Tensor, shape: Any) -> Tensor:
    sizes = [_size(n) for n in shape]
    return x.reshape(
        [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(sizes)]
    )


def _normalize(a: Attributes, x: Tensor, *statistics: Tensor) -> Tensor:
    scale, bias, mean, variance = statistics
    return F.batch_norm(x, mean, variance, scale, bias, eps=a.get("epsilon", 1e-5))


def _prelu(_: Attributes, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


# Attributes that may only have these values.
_PLAIN: Attributes = {
    "allowzero": 0,
    "auto_pad": b"NOTSET",
    "ceil_mode": 0,
    "layout": 0,
    "mode": b"constant",
    "reduction": b"none",
    "training_mode": 0,
}
_OPERATORS: dict[str, Operator] = {
    "Add": lambda a, x, y: x + _tensor(y),
    "BatchNormalization": _normalize,
    "Cast": lambda a, x: x.to({1: torch.float32, 7: torch.int64}[a["to"]]),
    "Concat": lambda a, *x: torch.cat([_tensor(each) for each in x], a["axis"]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": lambda a, x, y: x / _tensor(y),
    "Einsum": lambda a, *x: torch.einsum(a["equation"].decode(), *x),
    "Gather": _gather,
    "Gemm": _gemm,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "MatMul": lambda a, x, y: x @ y,
    "MaxPool": lambda a, x: F.max_pool2d(x, a["kernel_shape"], a["strides"]),
    "Mul": lambda a, x, y: x * _tensor(y),
    "Pad": _pad,
    "Pow": lambda a, x, y: x ** _tensor(y),
    "PRelu": _prelu,
    "ReduceMean": lambda a, x: x.mean(a["axes"], bool(a.get("keepdims", 1))),
    "Relu": lambda a, x: x.relu(),
    "Reshape": _reshape,
    "ScatterND": _scatter,
    "Sigmoid": lambda a, x: x.sigmoid(),
    "Slice": _slice,
    "Sqrt": lambda a, x: x.sqrt(),
    "Squeeze": _squeeze,
    "Sub": lambda a, x, y: x - _tensor(y),
    "Tanh": lambda a, x: x.tanh(),
    "Transpose": lambda a, x: x.permute(*a["perm"]),
    "Unsqueeze": _unsqueeze,
}


def _constant(a: Attributes, shape: np.ndarray) -> Tensor:
    value = to_array(a["value"]) if "value" in a else np.zeros(1, np.float32)
    return torch.full([*map(_size, shape)], value[0].item(), dtype=_tensor(value).dtype)


def _size(n: Any) -> Any:
    """A size; one that an exporter leaves open stays what it is."""
    return n if isinstance(n, torch.SymInt) else int(n)


def _unsqueezed(a: Attributes, x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.expand_dims(x, tuple(_axes(a, axes)))


def _sliced(
    _: Attributes, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> Any:
    return x[tuple(_parts(x.ndim, starts, ends, axes, steps))]


_OF_SHAPES: dict[str, Callable[..., Any]] = {
    "Add": lambda a, x, y: x + y,
    "Cast": lambda a, x: x.astype({1: np.float32, 7: np.int64}[a["to"]]),
    "Concat": lambda a, *x: np.concatenate(x, a["axis"]),
    "ConstantOfShape": _constant,
    "Gather": lambda a, x, index: np.take(x, index, a.get("axis", 0)),
    "Mul": lambda a, x, y: x * y,
    "Reshape": lambda a, x, shape: x.reshape(shape),
    "Shape": lambda a, x: np.array(x.shape),
    "Slice": _sliced,
    "Squeeze": lambda a, x, axes=None: np.squeeze(x, tuple(_axes(a, axes))),
    "Transpose": lambda a, x: x.transpose(a["perm"]),
    "Unsqueeze": _unsqueezed,
}
