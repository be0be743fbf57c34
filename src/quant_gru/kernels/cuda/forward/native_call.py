"""Calls of one size in native code: what their tensors are, and which arguments follow them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_runtime.allocators import Maker, maker, parts
from kernel_runtime.cuda.launch import Machine, Prepared
from kernel_runtime.cuda.streams import native_streams
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.border import CallForm
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.boundary.conversions import row_maker


class Sizes(NamedTuple):
    """How large everything in a call is.

    Attributes:
        T: Steps.
        N: Rows.
        C: Features of the input.
        H: Units.
        layers: Layers.
        directions: Directions.
        space: Bytes that launches share among themselves.
        codes: Bytes of the states' codes.
    """

    T: int
    N: int
    C: int
    H: int
    layers: int
    directions: int
    space: int
    codes: int


class Makers(NamedTuple):
    """What makes the tensors of a call.

    Attributes:
        y: Output (T, N, D*H).
        y_otherwise: The same as (N, T, D*H), laid out as the other; where rows are packed, the
            output (rows, D*H) of so many rows.
        h_n: Last states (layers * D, N, H).
        space: What launches share among themselves, bytes.
        whole_space: The same and codes of states.
        nan: What tells which rows are NaN (layers * D, N).
        codes: Codes of states, by themselves.
    """

    y: Maker
    y_otherwise: Callable[..., Tensor]
    h_n: Maker
    space: Maker
    whole_space: Maker
    nan: Maker
    codes: Maker


def makers_of(
    sizes: Sizes, form: CallForm, container: torch.dtype | None, device: torch.device
) -> Makers:
    """What makes the tensors of calls.

    Args:
        sizes: Their sizes.
        form: Their form.
        container: Of the states' codes, where there is one layer and direction.
        device: Where they are.
    """
    T, N, _, H, layers, D, space, codes = sizes
    dtype = form.results
    return Makers(
        y=maker((T, N, D * H), device, dtype),
        y_otherwise=row_maker(D * H, device, dtype)
        if form.is_packed
        else maker((N, T, D * H), device, dtype, order=(1, 0, 2)),
        h_n=maker((layers * D, N, H), device, form.last),
        space=maker((space,), device, torch.int8),
        whole_space=maker((space + codes,), device, torch.int8),
        nan=maker((layers * D, N), device),
        codes=maker((codes,), device, torch.int8)
        if container is None
        else maker((T, N, H), device, container),
    )


class Memories(NamedTuple):
    """Which fields of arguments point to each tensor of a call, in the order of native code."""

    x: Memory
    h0: Memory
    lengths: Memory
    y: Memory
    h_n: Memory
    nan: Memory
    codes: Memory
    space: Memory
    sorted: Memory
    unsorted: Memory

    @classmethod
    def around(cls, x: Memory) -> Memories:
        """New ones, with those of the input."""
        return cls(x, *(Memory() for _ in cls._fields[1:]))


def native_call(
    machine: Machine,
    launches: Prepared,
    memories: Memories,
    inputs: Iterable[tuple[Any, bool]],
    sizes: Sizes,
    makers: Makers,
    device: torch.device,
    *,
    keeps: bool,
    keep: Any,
) -> _native.Call:
    """All of a call in native code.

    Args:
        machine: Where it runs.
        launches: All of them.
        memories: What points to the tensors.
        inputs: Records with the strides of x, and whether they have a flag `fours` that may be set.
        sizes: How large all of it is.
        makers: What makes the tensors.
        device: Where they are.
        keeps: Whether calls keep what a backward needs.
        keep: What holds what arguments point to.
    """
    fields = []
    for record, may in inputs:
        at, kind = ctypes.addressof(record), type(record)
        fours = getattr(kind, "fours", None)
        flag = (at + fours.offset, fours.size) if fours else (0, 0)
        fields.append((at + kind.step.offset, at + kind.next.offset, *flag, may))
    made = makers if keeps else makers[:5]
    return _native.Call(
        launches.native,
        [each.fields for each in memories],
        fields,
        (sizes.T, sizes.N, sizes.C, sizes.space, sizes.codes),
        [parts(each) for each in made],
        Tensor,
        device.index if device.type == "cuda" else -1,
        native_streams(machine, device),
        machine.raise_for,
        (launches, memories, keep),
    )
