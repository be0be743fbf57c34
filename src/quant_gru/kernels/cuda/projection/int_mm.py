"""The input projection by a GEMM of torch, and for a few rows of codes by a warp for each unit."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner

FEWEST_ROWS = 32  # torch._int_mm takes more than 16
_THREADS = 256

_SPLIT, _FINISH, _FEW = (
    Kernel.of("projection/int_mm", name, PLAIN) for name in ("split", "finish", "project")
)


def split(rows: int, padded: int) -> tuple[Kernel, Grid]:
    """The launch that splits codes into bytes.

    Args:
        rows: Rows of codes.
        padded: Bytes of a row.
    """
    return _SPLIT, Grid((rows, 1), _threads(padded))


def few_rows(rows: int, H: int) -> tuple[Kernel, Grid]:
    """The launch of a projection from codes, a warp for each unit.

    Args:
        rows: Steps times batch.
        H: Units.
    """
    return _FEW, Grid((rows, -(-H // (_THREADS // 32))), _THREADS)


def requantize(shape: planner.Shape, T: int, N: int) -> tuple[Kernel, Grid]:
    """The launch that rounds the result of the GEMM to codes."""
    return _FINISH, Grid((T * shape.strips(N), 1), _threads(shape.units * shape.strip))


def fill(p: Any, numbers: Numbers, shape: planner.Shape, N: int) -> None:
    """Set the fields of arguments that say how codes of W x are laid out."""
    p.W = numbers.W
    p.wide, p.NB, p.tiles = numbers.form.wide_input, shape.strip, shape.strips(N)
    p.groups = shape.units // 16


def fill_gemm(p: Any, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Set the fields that describe the GEMM.

    Returns:
        Its weights, bytes (padded C, columns), and the constants of its columns, which are to be
        kept as long as the arguments.
    """
    weights, folded = numbers.gemm[0]
    p.planes_x, p.planes_W = numbers.x_planes, numbers.W_planes
    p.padded_C, p.columns = weights.shape
    p.x_offset, p.folded = numbers.x_offset, folded.data_ptr()
    return weights, folded


def multiply_bytes(rows: Tensor, weights: Tensor, result: Tensor) -> None:
    """The product of two matrices of int8, in int32."""
    try:
        torch._int_mm(rows, weights, out=result)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # cuBLAS has no kernel for some sizes; float64 is exact, too
        result.copy_(rows.to(torch.float64) @ weights.to(torch.float64))


@functools.cache
def load_gemm(device: torch.device) -> None:
    """Let torch load its library of GEMMs, for which the first product would wait.

    Args:
        device: Where products will be made; the current one.
    """
    rows, weights = (
        torch.zeros((n, 64), dtype=torch.int8, device=device) for n in (FEWEST_ROWS, 64)
    )
    result = torch.empty((len(rows), 64), dtype=torch.int32, device=device)
    multiply_bytes(rows, weights.t(), result)


def _threads(work: int) -> int:
    return min(_THREADS, -(-work // 32) * 32)
