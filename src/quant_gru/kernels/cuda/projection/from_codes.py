"""The input projection from codes in one launch: an int8 GEMM with a requantizing epilogue."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels import _native
from quant_gru.kernels._native import Epilogue, Shape, Tile, WeightStationary
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import ProjectBytesC, ProjectPassingC


def epilogue_of(numbers: Numbers) -> Epilogue:
    """Return the parameters of epilogue.cuh for a plan's projection."""
    return _native.epilogue_of(numbers.frozen.native, numbers.C)


def projection(
    numbers: Numbers,
    shape: Shape,
    T: int,
    N: int,
    tile: Tile | WeightStationary,
    processors: int,
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of one direction.

    Args:
        numbers: Numbers of a plan with 8-bit weights.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        tile: The blocks.
        processors: Multiprocessors of the device.

    Returns:
        The kernel, its grid, its arguments without `bytes`, `Wx` and `counts`, and tensors to keep.
    """
    units, rows = shape.units, T * shape.strips(N) * shape.strip
    epilogue = epilogue_of(numbers)
    p: Any
    if isinstance(tile, Tile):
        p, made = ProjectBytesC(), tile.launch(units, rows, epilogue)
    else:
        p = ProjectPassingC()
        made, p.share = tile.launch(units, rows, numbers.padded_C, processors, epilogue)
    keep = fill(p, numbers, shape, T, N)
    kernel, grid = planner.launch_of(made)
    return kernel, grid, p, keep


def fill(p: Any, numbers: Numbers, shape: Shape, T: int, N: int) -> list[Tensor]:
    """Set the fields that the epilogue reads, and return the tensors to keep."""
    weights, folded = numbers.gemm[0]
    (folded_bytes, m), exact = numbers.of_bytes, numbers.exact_float[0]
    keep = [weights, folded, folded_bytes, m, exact]
    W = numbers.W
    p.weights, p.m, p.folded = weights.data_ptr(), W.m, folded.data_ptr()
    p.folded_bytes, p.m_float = folded_bytes.data_ptr(), m.data_ptr()
    p.exact_float = exact.data_ptr()
    p.T, p.N, p.H, p.padded = T, N, numbers.H, weights.shape[0]
    p.NB, p.tiles, p.groups = shape.strip, shape.strips(N), shape.units // 16
    p.wide = numbers.form.wide_input
    p.lo, p.hi, p.code_lo = W.lo, W.hi, W.code_lo
    return keep
