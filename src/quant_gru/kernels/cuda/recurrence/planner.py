"""The layout of a recurrence on a GPU, which `kernels/cuda/host/plans/planner.cpp` chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.errors import QuantGRUError
from quant_gru.kernels import _native
from quant_gru.kernels._native import Form, Shape, make_shape, possible_shapes, time_of

__all__ = [
    "VARIABLE",
    "Form",
    "Shape",
    "StateOutputs",
    "choose",
    "grid_of",
    "launch_of",
    "layout",
    "make_shape",
    "possible_shapes",
    "time_of",
]

VARIABLE = "QUANT_GRU_CUDA_SHAPE"


class StateOutputs(NamedTuple):
    """Which forms of every step's states are written by a launch with real first and last states.

    Attributes:
        values: Whether it writes real values.
        codes: Whether it writes codes.
    """

    values: bool
    codes: bool


def choose(
    form: Form, H: int, N: int, directions: int, clusters: Mapping[int, int]
) -> Shape | None:
    """Return the shape with the least estimated time, or None if weights do not fit registers.

    `QUANT_GRU_CUDA_SHAPE=blocks,split,spread,rows` overrides the choice.

    Args:
        form: The form of the launch.
        H: Units.
        N: Rows.
        directions: Directions of the launch.
        clusters: Blocks per cluster -> number of such clusters that the device runs at once.

    Raises:
        QuantGRUError: The variable names no shape that the device can run.
    """
    try:
        return _native.choose_shape(form, H, N, directions, clusters)
    except ValueError as error:
        raise QuantGRUError(str(error)) from None


def layout(
    shape: Shape,
    form: Form,
    H: int,
    N: int,
    directions: int,
    held: bool = False,
    outputs: StateOutputs | None = None,
    early: bool = False,
    chunk: int = 0,
) -> tuple[Kernel, Grid]:
    """Return the kernel and grid for N rows of H units.

    Args:
        shape: The layout on the GPU.
        form: The plan's form.
        H: Units.
        N: Rows.
        directions: Directions of the launch.
        held: Whether some units keep their state in a step.
        outputs: Which forms of the states are written; None if the launch reads and writes codes.
        early: Whether blocks may start while the previous launch ends. Allowed only if every block
            of the launch gets a multiprocessor of its own.
        chunk: Steps per time chunk that the recurrence waits for if it overlaps with the input
            projection; 0 without overlap.
    """
    made = _native.recurrence_layout(shape, form, H, N, directions, held, outputs, early, chunk)
    return launch_of(made)


def launch_of(made: _native.NativeLaunch) -> tuple[Kernel, Grid]:
    """Return a launch of native code: its kernel and grid."""
    source, function, macros, grid = made
    return Kernel.of(source, function, macros), grid_of(grid)


def grid_of(made: _native.NativeGrid) -> Grid:
    """Return a grid of native code."""
    blocks, threads, cluster, shared_bytes, early = made
    return Grid(blocks, threads, cluster, shared_bytes, early=early)
