"""The layout of recurrences on a GPU, which `kernels/cuda/host/plans/planner.cpp` chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quant_gru.errors import QuantGRUError
from quant_gru.kernel_runtime.cuda.launch import Grid
from quant_gru.kernels import _native
from quant_gru.kernels._native import Form, Shape, make_shape, possible_shapes, time_of

__all__ = ["Form", "Shape", "make_shape", "possible_shapes", "time_of"]  # defined elsewhere

VARIABLE = "QUANT_GRU_CUDA_SHAPE"


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
    with our_errors():
        return _native.choose_shape(form, H, N, directions, clusters)


@contextmanager
def our_errors() -> Iterator[None]:
    """Raise errors of native code as errors of this package."""
    try:
        yield
    except ValueError as error:
        raise QuantGRUError(str(error)) from None


def grid_of(made: _native.NativeGrid) -> Grid:
    """Return a grid of native code."""
    blocks, threads, cluster, shared_bytes, early, together = made
    return Grid(blocks, threads, cluster, shared_bytes, together, early)
