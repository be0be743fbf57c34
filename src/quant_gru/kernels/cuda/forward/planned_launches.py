"""Launches that native code has planned (host/launches.hpp): their arguments and products."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.launch import Machine, Prepared
from quant_gru.kernels import _native

BLOCKS, LENGTHS, SPACE = 10, 2, 7
"""The number of memories of a call, and the places of lengths and workspace among them."""


def arguments_of(launch: _native.PlannedLaunch) -> Any:
    """Return the arguments of a launch, in which addresses of memories are missing."""
    arguments = launch[4]
    return (ctypes.c_uint64 * (len(arguments) // 8)).from_buffer_copy(arguments)


_Work = TypeVar("_Work", bound=Callable[..., None])


def joined(machine: Machine, steps: Iterable[Prepared | _Work]) -> list[Prepared | _Work]:
    """Return launches and functions with consecutive launches joined into one."""
    found: list[Any] = []
    for is_function, run in itertools.groupby(steps, callable):
        group: list[Any] = list(run)
        found += group if is_function else [machine.join(group)]
    return found


def point(launch: _native.PlannedLaunch, arguments: Any, bases: Sequence[int]) -> None:
    """Set the addresses in arguments.

    Args:
        launch: The launch.
        arguments: The result of `arguments_of`.
        bases: The address of each memory, or 0.
    """
    for at, block, offset in launch[5]:
        arguments[at // 8] = bases[block] + offset if bases[block] else 0


def product_in(
    space: Tensor, x: Tensor | None, weights: Tensor, product: _native.PlannedProduct
) -> None:
    """Multiply int8 rows with weights.

    Args:
        space: The workspace, int8, which receives the result.
        x: The rows (count, padded features) if they are not a part of the workspace.
        weights: int8 (padded features, columns).
        product: Sizes and places.
    """
    _, _, count, padded, columns, (memory, first), (_, at) = product
    rows = space.as_strided((count, padded), (padded, 1), first) if memory == SPACE else x
    assert rows is not None
    result = space[at : at + 4 * count * columns].view(torch.int32).view(count, columns)
    multiply_bytes(rows, weights, result)


def multiply_bytes(rows: Tensor, weights: Tensor, result: Tensor) -> None:
    """Write the int32 product of two int8 matrices to `result`."""
    try:
        torch._int_mm(rows, weights, out=result)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # cuBLAS has no kernel for some sizes; float64 is exact as well
        result.copy_(rows.to(torch.float64) @ weights.to(torch.float64))


@functools.cache
def load_gemm(device: torch.device) -> None:
    """Make torch load its GEMM library, so that the first product does not wait for it.

    Args:
        device: The device of later products, which is the current device.
    """
    rows, weights = (torch.zeros((n, 64), dtype=torch.int8, device=device) for n in (32, 64))
    result = torch.empty((len(rows), 64), dtype=torch.int32, device=device)
    multiply_bytes(rows, weights.t(), result)
