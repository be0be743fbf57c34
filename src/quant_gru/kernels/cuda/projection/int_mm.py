"""The input projection by a GEMM of torch or, for few rows of codes, by a warp per unit."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner

FEWEST_ROWS = 32  # torch._int_mm requires more than 16
_THREADS = 256

_SPLIT, _FINISH, _FEW = (
    Kernel.of("projection/int_mm", name, PLAIN) for name in ("split", "finish", "project")
)


def split(rows: int, padded: int) -> tuple[Kernel, Grid]:
    """Return the launch that splits codes into bytes.

    Args:
        rows: Rows of codes.
        padded: Bytes per row.
    """
    return _SPLIT, Grid((rows, 1), _threads(padded))


def few_rows(rows: int, H: int) -> tuple[Kernel, Grid]:
    """Return the launch of a projection from codes with a warp per unit.

    Args:
        rows: Steps times batch.
        H: Units.
    """
    return _FEW, Grid((rows, -(-H // (_THREADS // 32))), _THREADS)


def requantize(shape: planner.Shape, T: int, N: int) -> tuple[Kernel, Grid]:
    """Return the launch that requantizes the result of the GEMM to codes."""
    return _FINISH, Grid((T * shape.strips(N), 1), _threads(shape.units * shape.strip))


def fill(p: Any, numbers: Numbers, shape: planner.Shape, N: int) -> None:
    """Set the fields of `p` that describe the layout of the codes of W x."""
    p.W = numbers.W
    p.wide, p.NB, p.tiles = numbers.form.wide_input, shape.strip, shape.strips(N)
    p.groups = shape.units // 16


def fill_gemm(p: Any, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Set the fields that describe the GEMM.

    Returns:
        The weights, int8 (padded C, columns), and the constants int64 (3H,) of the columns. The
        caller keeps both as long as the arguments.
    """
    weights, folded = numbers.gemm[0]
    p.planes_x, p.planes_W = numbers.x_planes, numbers.W_planes
    p.padded_C, p.columns = weights.shape
    p.x_offset, p.folded = numbers.x_offset, folded.data_ptr()
    return weights, folded


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
    rows, weights = (
        torch.zeros((n, 64), dtype=torch.int8, device=device) for n in (FEWEST_ROWS, 64)
    )
    result = torch.empty((len(rows), 64), dtype=torch.int32, device=device)
    multiply_bytes(rows, weights.t(), result)


def _threads(work: int) -> int:
    return min(_THREADS, -(-work // 32) * 32)
