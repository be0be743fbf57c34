"""Launches that native code has planned (host/launches.hpp), prepared, and products among them."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.recurrence import planner

BLOCKS, LENGTHS, SPACE = 10, 2, 7
"""The number of memories of a call, and the places of lengths and workspace among them."""

Work = Callable[[Tensor, Sequence[Tensor | None] | None], None]
"""Work of torch between launches. It gets the workspace of a call, and the gradients it makes."""


def arguments_of(launch: _native.PlannedLaunch) -> Any:
    """Return the arguments of a launch, in which addresses of memories are missing."""
    arguments = launch[4]
    return (ctypes.c_uint64 * (len(arguments) // 8)).from_buffer_copy(arguments)


def start(machine: Device, launch: _native.PlannedLaunch) -> None:
    """Start a launch whose arguments have all addresses."""
    kernel, grid = Kernel.of(*launch[:3]), planner.grid_of(launch[3])
    machine.launch(kernel, grid, arguments_of(launch))


class Steps:
    """Prepares the steps of calls that differ only in the addresses of their tensors.

    Args:
        machine: The machine that runs the kernels.
        tensors: The number of tensors of a call.
        changing: Those whose addresses differ from call to call. Launches that follow them are
            apart from others, which can be graphs.

    Attributes:
        memories: The argument fields that follow each tensor.
        records: The arguments of the launches.
    """

    def __init__(self, machine: Device, tensors: int, changing: Collection[int] = ()) -> None:
        self.machine, self._changing = machine, frozenset(changing)
        self.memories = [Memory() for _ in range(tensors)]
        self.records: list[Any] = []
        self._steps: list[tuple[Prepared | Work, frozenset[int]]] = []

    def launch(self, launch: _native.PlannedLaunch) -> int:
        """Add a launch, and return the address of its arguments."""
        record = arguments_of(launch)
        base = ctypes.addressof(record)
        for at, tensor, offset in launch[5]:
            self.memories[tensor].fields.add(base + at, offset)
        self.records.append(record)
        kernel = Kernel.of(*launch[:3])
        prepared = self.machine.prepare(kernel, planner.grid_of(launch[3]), record)
        self.add(prepared, [tensor for _, tensor, _ in launch[5]])
        return base

    def add(self, step: Prepared | Work, tensors: Iterable[int] = ()) -> None:
        """Add a prepared launch that follows tensors, or work of torch."""
        self._steps.append((step, frozenset(tensors)))

    def native(self, keep: object) -> _native.Steps:
        """Return all steps, with consecutive launches joined into one if all or none change.

        Args:
            keep: The owners of other memory whose addresses the arguments have.
        """
        steps: list[Any] = []
        uses: list[list[int]] = []
        for (is_work, _), run in itertools.groupby(self._steps, self._kind):
            pairs: list[Any] = list(run)
            group = [step for step, _ in pairs]
            tensors = sorted(frozenset().union(*(each for _, each in pairs)))
            steps += group if is_work else [self.machine.join(group)]
            uses += [tensors] * (len(group) if is_work else 1)
        return _native.Steps(
            [each if callable(each) else each.native for each in steps],
            uses,
            [each.fields for each in self.memories],
            self.machine.raise_for,
            (steps, self.memories, self.records, keep),
        )

    def _kind(self, step: tuple[Prepared | Work, frozenset[int]]) -> tuple[bool, bool]:
        return callable(step[0]), not self._changing.isdisjoint(step[1])


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
