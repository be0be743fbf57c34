"""The layout of recurrences on a GPU, and the directions that share a launch.

`kernels/cuda/host/plans/planner.cpp` chooses both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.errors import QuantGRUError
from quant_gru.kernels import _native
from quant_gru.kernels._native import Form, Shape, make_shape, possible_shapes, time_of
from quant_gru.kernels.cuda.plan.tensors import Numbers

__all__ = ["Form", "Shape", "make_shape", "possible_shapes", "time_of"]  # defined elsewhere

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
    with _our_errors():
        return _native.choose_shape(form, H, N, directions, clusters)


class HasNumbers(Protocol):
    """One layer and direction.

    Attributes:
        numbers: Its plan's numbers.
    """

    numbers: Numbers


_Direction = TypeVar("_Direction", bound=HasNumbers)


def launches_of(
    directions: Sequence[_Direction], N: int, clusters: Mapping[int, int]
) -> Sequence[tuple[Sequence[_Direction], Form]]:
    """Return the directions of each launch of a layer's recurrences, and its form.

    Directions with equal forms share a launch. Directions with different forms share a launch
    whose form is exact for both, unless two launches take less time. Two launches can be faster if
    one direction fills a device.

    Args:
        directions: One or two directions.
        N: Rows.
        clusters: As for `choose`.
    """
    numbers = [each.numbers for each in directions]
    H, joint = numbers[0].H, None
    if all(each.H == H for each in numbers):
        forms = [(each.form, each.frozen.native) for each in numbers]
        with _our_errors():
            joint = _native.shared_form(forms, H, N, clusters)
    if joint is not None:
        return [(directions, joint)]
    return [([each], each.numbers.form) for each in directions]


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
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
