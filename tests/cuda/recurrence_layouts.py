"""Layouts of recurrences for tests."""

from typing import NamedTuple

from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.recurrence import planner


class StateOutputs(NamedTuple):
    """Which forms of every step's states a launch with real first and last states writes."""

    values: bool
    codes: bool


def layout(shape, form, H, N, directions, held=False, outputs=None, early=False, chunk=0):
    """The kernel and grid for N rows of H units, see `RecurrenceUse` in planner.hpp."""
    made = _native.recurrence_layout(shape, form, H, N, directions, held, outputs, early, chunk)
    return launch_of(made)


def launch_of(made):
    """The kernel and grid of a launch of native code."""
    source, function, macros, grid = made
    return Kernel.of(source, function, macros), planner.grid_of(grid)
