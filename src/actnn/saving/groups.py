"""How many elements of a tensor share a range."""

from __future__ import annotations

import math

from torch import SymInt, Tensor

from actnn.codec.memory_order import order_of
from actnn.codec.noise import RUN

CONVOLUTION = "ConvolutionBackward0"


def group_of(x: Tensor, most: int, convolved: bool) -> int:
    """Return the elements of a group of codes: no more than a channel has, as far as runs allow.

    Channels may differ in size by any factor, and a batch norm makes them equal. In a range that
    several channels share, a quiet one is lost. Where channels are innermost in memory, all groups
    share them, and stay as they are: smaller ones cost more than they gain. So do groups of
    tensors whose sizes are not known while code is compiled.

    Args:
        x: The tensor. Beside samples and channels, it has positions if it has four or more
            dimensions.
        most: Elements of other groups.
        convolved: Whether a convolution has made it, so that three dimensions are enough.
    """
    if x.dim() < (3 if convolved else 4) or order_of(x) != list(range(x.dim())):
        return most
    positions = x.shape[2:]
    if any(isinstance(size, SymInt) for size in positions):
        return most
    return min(most, max(1, math.prod(positions) // RUN) * RUN)
