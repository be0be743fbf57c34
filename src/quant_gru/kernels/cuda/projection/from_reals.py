"""The input projection from real values in one launch: codes of x stay in shared memory."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels import _native
from quant_gru.kernels._native import Shape, Warpgroups
from quant_gru.kernels.cpu.plan_packing import pack_quantizer
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection import from_codes
from quant_gru.kernels.cuda.projection.select import RealBlocks, size_of
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import ProjectFewC, ProjectRealsC

_FEW_UNITS = 8  # units per block, one per warp


def divides_without_branch(x: Quantizer) -> bool:
    """Return whether `fill_division` gives exact codes of up to 16 bits."""
    return _native.divides(pack_quantizer(x))


def kernel_of(block: RealBlocks, numbers: Numbers, shape: Shape, x: Quantizer) -> Kernel:
    """Return the kernel for a plan, the recurrence's shape, and the quantizer of x."""
    size, epilogue = size_of(numbers, shape, 1, 1), from_codes.epilogue_of(numbers)
    return planner.launch_of(_native.real_launch(block, epilogue, size, pack_quantizer(x)))[0]


def real_projection(
    numbers: Numbers, shape: Shape, T: int, N: int, x: Quantizer, block: RealBlocks
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of one direction from real values.

    Args:
        numbers: Numbers of a plan with 8-bit weights.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        x: The quantizer of x.
        block: The blocks.

    Returns:
        The kernel, its grid, its arguments without `real`, `nan`, `Wx`, `step`, `next` and
        `fours`, and tensors to keep.
    """
    p: Any = ProjectRealsC()
    keep = from_codes.fill(p, numbers, shape, T, N)
    if isinstance(block, Warpgroups):
        keep.append(numbers.tiles)
        p.weights = keep[-1].data_ptr()
    p.C, p.nan_stride, p.parts = numbers.C, -(-T // 4) * 4, block.parts
    p.zero = x.zero_point - numbers.x_offset
    fill_division(p.division, x)
    made = _native.real_launch(
        block, from_codes.epilogue_of(numbers), size_of(numbers, shape, T, N), pack_quantizer(x)
    )
    return *planner.launch_of(made), p, keep


def few_projection(
    numbers: Numbers, shape: Shape, T: int, N: int, x: Quantizer
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of few rows from real values, with a warp per unit."""
    p: Any = ProjectFewC()
    weights, _ = numbers.gemm[0]
    p.weights, p.padded = weights.data_ptr(), weights.shape[0]
    p.N, p.C, p.H, p.nan_stride = N, numbers.C, numbers.H, -(-T // 4) * 4
    p.NB, p.tiles, p.groups = shape.strip, shape.strips(N), shape.units // 16
    p.wide = numbers.form.wide_input
    p.W = numbers.W
    fill_division(p.division, x)
    kernel = Kernel.of(
        "projection/reals_few_rows", "project_few", {**PLAIN, "WIDE": int(numbers.x_planes == 2)}
    )
    grid = Grid((T * N, -(-numbers.H // _FEW_UNITS)), 32 * _FEW_UNITS)
    return kernel, grid, p, [weights]


def fill_division(d: Any, x: Quantizer) -> None:
    """Set the constants for division by a quantizer's scale without branches."""
    made = _native.division_of(pack_quantizer(x))
    ctypes.memmove(ctypes.addressof(d), made, len(made))
