"""Memory that a call takes, and the addresses in arguments that follow it from call to call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.kernels.cpu import _native

_ALIGNMENT = 256

Maker = functools.partial[Tensor]
"""Makes a tensor of one kind at each call."""


class Memory:
    """One piece of memory: how much, and which fields of arguments point into it.

    Attributes:
        fields: Those fields, in native code.
    """

    def __init__(self) -> None:
        self.size = 0
        self.fields = _native.Fields()
        self._add = self.fields.add
        self.move = self.fields.move
        """move(base): set all fields to the memory at a new address; where that is 0, to null."""

    def take(self, size: int) -> int:
        """Room for some bytes; returns where it starts."""
        start = self.size
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return start

    def point(self, record: Any, name: str, offset: int = 0, index: int = 0) -> None:
        """Let a field, or an element of it, hold an address of this memory.

        Args:
            record: A structure that lives as long as this.
            name: Its field.
            offset: Bytes from the start of this memory.
            index: Element of the field.
        """
        at = ctypes.addressof(record) + getattr(type(record), name).offset + 8 * index
        self._add(at, offset)


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


def parts(make: Maker) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """A maker as a function and its arguments, as native code calls it."""
    return (make, ()) if make.keywords else (make.func, make.args)
