"""The variance that codes of the input of a linear or convolution layer add to its gradient.

With b bits it is at most factor x ranges x energy / (2^b - 1)^2: ranges is the sum of the squared
ranges of all groups, energy the squared norm of the output's gradient, and
factor = group K / (4 I g): K kernel positions, I positions of the input, g groups of the
convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SAMPLED = 1024  # groups whose ranges stand for those of a whole tensor

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def kernel_positions(module: nn.Module) -> int | None:
    """Kernel positions of a linear or convolution layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return 1
    if isinstance(module, _CONVOLUTIONS):
        return torch.Size(module.kernel_size).numel()
    return None


class Layer(NamedTuple):
    """A linear or convolution layer.

    Attributes:
        positions: Kernel positions, over the groups of the convolution.
        channels: Of the input.
    """

    positions: float
    channels: int

    @classmethod
    def all_of(cls, model: nn.Module) -> dict[str, Layer]:
        """Return the layers of a model by their paths."""
        found = {}
        for path, module in model.named_modules():
            positions = kernel_positions(module)
            if positions is not None:
                linear = isinstance(module, nn.Linear)
                channels: Any = module.in_features if linear else module.in_channels
                found[path] = cls(positions / getattr(module, "groups", 1), max(1, channels))
        return found

    def factor(self, group: int, elements: int) -> float:
        """Return group K / (4 I g) for a group of the codec and elements that share bits."""
        return group * self.positions * self.channels / (4 * elements)


def sampled_ranges(tensor: Tensor, group: int) -> Tensor:
    """Sum of the squared ranges of all groups of a dense tensor, from some of them, float32 ()."""
    elements = tensor.numel()
    flat = tensor.as_strided((elements,), (1,))
    count = elements // group
    if count:
        flat = flat[: count * group].view(count, group)[:: -(-count // SAMPLED)]
    low, high = flat.aminmax(dim=-1)
    return (high.float() - low.float()).square().mean() * (elements / group)
