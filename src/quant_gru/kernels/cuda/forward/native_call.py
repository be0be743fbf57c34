"""Calls of one size in native code: their tensors, and the launch arguments that point to them."""

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
from quant_gru.integer.call_form import CallForm
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.boundary.conversions import row_maker


class Sizes(NamedTuple):
    """The sizes of a call.

    Attributes:
        T: Steps.
        N: Rows.
        C: Features of the input.
        H: Units.
        layers: Layers.
        directions: Directions.
        space: Bytes of the workspace that launches share.
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
    """Allocators of a call's tensors.

    Attributes:
        y: Output (T, N, D*H).
        y_otherwise: Output (N, T, D*H) in memory order (T, N, D*H). For packed rows, output
            (rows, D*H); the number of rows is an argument.
        h_n: Last states (layers * D, N, H).
        space: The workspace that launches share, int8.
        whole_space: The workspace followed by the codes of states, int8.
        nan: Flags of NaN rows (layers * D, N).
        codes: Codes of states, as a separate tensor.
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
    """Return the allocators of a call's tensors.

    Args:
        sizes: The sizes of calls.
        form: The form of calls.
        container: The dtype of the states' codes if there is one layer and direction, or None.
        device: The device of the tensors.
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
    """The argument fields that point to each tensor of a call, in the order of native code."""

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
        """Return memories without fields, except for the input's memory `x`."""
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
    """Return a native object that runs a whole call.

    Args:
        machine: The GPU that runs the call.
        launches: All launches of the call.
        memories: The argument fields that point to the tensors.
        inputs: Records with the strides of x, and whether their flag `fours` may be set.
        sizes: The sizes of the call.
        makers: The allocators of the tensors.
        device: The device of the tensors.
        keeps: Whether calls keep data for a backward.
        keep: The owners of memory that arguments point to, kept alive by the result.
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
