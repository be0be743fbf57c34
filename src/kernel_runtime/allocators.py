"""Tensors that calls make again and again: what makes one of a kind, cheaply on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Maker = functools.partial[Tensor]
"""Makes a tensor of one kind at each call."""

_CPU = torch.device("cpu")
# what torch's compiled code allocates by, past the dispatcher
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_EMPTY = {kind: getattr(_guards, f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


def maker(
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    order: Sequence[int] | None = None,
) -> Maker:
    """What makes tensors of one kind, as `torch.empty` does, in a third of the time on the host.

    Args:
        shape: Their shape.
        device: Their device; where it is a GPU it has to be the current one at each call.
        dtype: Their dtype.
        order: Dimensions from the one whose elements lie furthest apart; None for contiguous ones.
    """
    strides, step = [0] * len(shape), 1
    for dimension in reversed(range(len(shape)) if order is None else order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    function = _EMPTY.get(device.type)
    if function is not None:
        return functools.partial(function, tuple(shape), tuple(strides), dtype)
    return functools.partial(
        torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device
    )


def empty(shape: Sequence[int]) -> Tensor:
    """A contiguous float32 tensor on the CPU, its values undefined."""
    return maker(shape, _CPU)()


def parts(make: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A maker, or another function, as a function and its arguments, as native code calls it."""
    if isinstance(make, functools.partial) and not make.keywords:
        return make.func, make.args
    return make, ()
