"""A tensor that is made again from one that is held: the result of a normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from actnn.saving.held import Held, Layout, refuse_changed


class Scale(NamedTuple):
    """y = x weight + bias, for the last dimensions; a parameter that is None is left out.

    Attributes:
        weight: The weight.
        bias: The bias.
        versions: Their versions when y was made.
    """

    weight: Tensor | None
    bias: Tensor | None
    versions: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor | None, bias: Tensor | None) -> Scale:
        """Return the scale with the parameters as they are now.

        With several processes these are copies. FSDP frees the memory of a norm's parameters after
        its forward, and the layer after it needs the norm's result before they are back.
        """
        if dist.is_available() and dist.is_initialized():
            weight = None if weight is None else weight.detach().clone()
            bias = None if bias is None else bias.detach().clone()
        versions = (
            0 if weight is None else weight._version,
            0 if bias is None else bias._version,
        )
        return cls(weight, bias, versions)

    def apply(self, x: Tensor) -> Tensor:
        """Return y, in the layout of x."""
        for parameter, version in zip((self.weight, self.bias), self.versions, strict=True):
            if parameter is not None:
                refuse_changed(parameter, version)
        if self.weight is None:
            return x
        if self.bias is None:
            return x * self.weight
        return torch.addcmul(self.bias, x, self.weight)


class Scaled:
    """The result of a scale, of which nothing is held but its operand.

    Args:
        operand: What is held.
        scale: Makes the tensor from it.
    """

    __slots__ = ("__weakref__", "_operand", "_scale")
    held = 0

    def __init__(self, operand: Held, scale: Scale) -> None:
        self._operand, self._scale = operand, scale

    @property
    def codes(self) -> tuple[Any, int, torch.Size] | None:
        """See `Held`: those of its operand."""
        return self._operand.codes

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the tensor, or a view of its elements."""
        y = self._scale.apply(self._operand.unpack())
        return y if view is None else y.as_strided(*view)
