"""The tensors around a GRU: which operator of which cell each one is, and under which name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quant_gru.interchange.foreign.onnx_constants import Constants


@dataclass(frozen=True)
class Place:
    """A tensor with an encoding.

    Attributes:
        name: Name of the tensor.
        operators: Its operators: 'input.x', 'output.h', or weights, one after the other.
        layer: Index of the layer.
        directions: Directions that the tensor contains; their quantizers have to be equal.
        update_first: Whether its rows are in the order of ONNX (z, r, n), not of PyTorch (r, z, n).
    """

    name: str
    operators: tuple[str, ...]
    layer: int
    directions: tuple[int, ...]
    update_first: bool = False

    @property
    def is_param(self) -> bool:
        """Whether the tensor is a weight or bias."""
        return self.operators[0].startswith("weight")

    @property
    def axis(self) -> int:
        """The dimension of the rows: weights have one for the directions before it in ONNX."""
        return 1 if self.update_first else 0


_TENSORS = {
    "input.x": "input",
    "output.h": "output",
    "weight.W": "weight_ih",
    "weight.R": "weight_hh",
    "weight.bw": "bias_ih",
    "weight.br": "bias_hh",
}


def torch_places(num_layers: int, directions: int, bias: bool, prefix: str = "") -> list[Place]:
    """Return places by the names of torch.nn.GRU's parameters: weight_ih_l0, input_l0, output_l0.

    Args:
        num_layers: Stacked layers.
        directions: 1 or 2.
        bias: Whether the GRU has biases.
        prefix: Start of all names, such as 'encoder.gru.'.
    """
    return [
        Place(f"{prefix}{tensor}_l{layer}{('', '_reverse')[d]}", (operator,), layer, (d,))
        for layer in range(num_layers)
        for d in range(directions)
        for operator, tensor in _TENSORS.items()
        if bias or not tensor.startswith("bias")
    ]


def onnx_places(nodes: Sequence[Any], directions: int, constants: Constants) -> list[Place]:
    """Return places by the names of the tensors of GRU nodes, one node per layer.

    Args:
        nodes: GRU nodes of an ONNX model, lowest layer first.
        directions: 1 or 2.
        constants: The constants of the model: an initial state among them has no encoding.
    """
    every = tuple(range(directions))
    places = []
    for layer, node in enumerate(nodes):
        inputs = [*node.input, "", "", "", "", "", ""]
        outputs = [*node.output, "", ""]
        initial = "" if inputs[5] and constants.known(inputs[5]) else inputs[5]
        named = [
            (inputs[0], ("input.x",)),
            (initial, ("output.h",)),
            (outputs[0], ("output.h",)),
            (outputs[1], ("output.h",)),
            (inputs[1], ("weight.W",)),
            (inputs[2], ("weight.R",)),
            (inputs[3], ("weight.bw", "weight.br")),
        ]
        places += [Place(name, ops, layer, every, True) for name, ops in named if name]
    return places
