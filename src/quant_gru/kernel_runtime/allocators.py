"""Cheap allocation on the host of tensors that every call needs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Maker = functools.partial[Tensor]
"""Makes a tensor of one kind at each call."""

_CPU = torch.device("cpu")
# the allocators of torch's compiled code, which bypass the dispatcher
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_EMPTY = {kind: getattr(_guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


def maker(
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    strides: Sequence[int] | None = None,
) -> Maker:
    """Return a function like `torch.empty` that takes a third of its time on the host.

    Args:
        shape: Shape of the tensors.
        device: Device of the tensors; a GPU must be the current device at each call.
        dtype: dtype of the tensors.
        strides: Strides of the tensors; None for contiguous ones.
    """
    if strides is None:
        sizes = [max(size, 1) for size in shape[1:]]
        strides = [math.prod(sizes[i:]) for i in range(len(shape))]
    return functools.partial(_function(device), tuple(shape), tuple(strides), dtype)


def empty(shape: Sequence[int]) -> Tensor:
    """Return an uninitialized, contiguous float32 tensor on the CPU."""
    return maker(shape, _CPU)()


def row_maker(features: int, device: torch.device, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """Return a function that allocates the data of a PackedSequence for a number of rows."""
    function, strides = _function(device), (features, 1)
    return lambda rows: function((rows, features), strides, dtype)


def _function(device: torch.device) -> Callable[..., Tensor]:
    """Return a function of shape, strides and dtype that allocates on a device."""
    return _EMPTY.get(device.type) or (
        lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )
    )
