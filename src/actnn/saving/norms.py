"""Which modules are normalizations, and the fewest bits of what they save."""

from __future__ import annotations

from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
NORM_BITS = 4
"""The backward of a norm subtracts x mean(g x). With fewer bits of x, the error of the gradient can
grow from layer to layer."""


def is_norm(module: nn.Module | None) -> bool:
    """Whether a module is a normalization of torch.nn, or of a class that is made from one."""
    return isinstance(module, NORMS)
