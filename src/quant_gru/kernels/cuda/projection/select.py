"""Selection of the kernel for the input projection of a direction."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kernel_runtime.cuda.launch import Machine
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection.from_codes import Tile, WeightStationary, block_of
from quant_gru.kernels.cuda.projection.from_reals import (
    FEWEST_ROWS,
    Block,
    Warpgroups,
    choose_for,
    reads_reals,
)
from quant_gru.kernels.cuda.projection.overlap import Overlap
from quant_gru.kernels.cuda.recurrence import planner

FEW_ROWS = 64  # steps times batch up to which codes are projected without tensor cores


class Method(Enum):
    """How a projection is computed."""

    REALS_FEW_ROWS = "from real values, a warp for each unit"
    REALS_TILED = "from real values, on tensor cores"
    CODES_FEW_ROWS = "from codes in their container, a warp for each unit"
    CODES_TILED = "from codes as bytes, on tensor cores"
    GEMM = "from codes as bytes, by a GEMM of torch and a kernel that requantizes"

    @property
    def reads_reals(self) -> bool:
        """Whether the projection reads and quantizes real values."""
        return self in (Method.REALS_FEW_ROWS, Method.REALS_TILED)


class Selection(NamedTuple):
    """The projection of a direction.

    Attributes:
        method: How it is computed.
        reals: The blocks of `REALS_TILED`.
        codes: The blocks of `CODES_TILED`.
    """

    method: Method
    reals: Block | Warpgroups | None = None
    codes: Tile | WeightStationary | None = None


def select(
    machine: Machine,
    numbers: Numbers,
    shape: planner.Shape,
    T: int,
    N: int,
    *,
    real_values: bool = False,
    overlap: Overlap | None = None,
) -> Selection:
    """Return the projection that measured fastest among those applicable.

    Args:
        machine: The machine that runs it.
        numbers: Numbers of the plan.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        real_values: Whether x is given as real values; otherwise it is given as codes.
        overlap: The overlap with the recurrence, or None.
    """
    if real_values and overlap is None:
        found = _from_real_values(machine, numbers, shape, T, N)
        if found is not None:
            return found
    if T * N <= FEW_ROWS:
        return Selection(Method.CODES_FEW_ROWS)
    if not numbers.projects_bytes:
        return Selection(Method.GEMM)
    codes = overlap.block if overlap else block_of(machine, numbers, shape, T, N)
    return Selection(Method.CODES_TILED, codes=codes)


def _from_real_values(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Selection | None:
    """Return a projection that reads real values, or None if one from codes is faster."""
    if not reads_reals(numbers):
        return None
    block = choose_for(machine, numbers, shape, T, N) if T * N > FEWEST_ROWS else None
    if block:
        return Selection(Method.REALS_TILED, reals=block)
    return Selection(Method.REALS_FEW_ROWS) if T * N <= FEW_ROWS else None
