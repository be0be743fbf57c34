"""The sizes of a layer's backward, the resulting shapes of its kernels, and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quant_gru.integer.backward import Wanted
from quant_gru.kernel_runtime.cuda.launch import Machine
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels.cuda.backward import grid_planner, planner
from quant_gru.kernels.cuda.backward.derivatives_planner import choose as derivatives_shape
from quant_gru.kernels.cuda.backward.final_gemms import Matrix
from quant_gru.kernels.cuda.backward.inputs import Call, Precision
from quant_gru.kernels.cuda.plan.structure import planes_of

FEWEST_ROWS = 32
"""The fewest rows of an int8 GEMM: torch._int_mm requires more than 16."""
_PRODUCT_BYTES = 32 << 20  # largest buffer of int32 sums of W x, or of R h
_CHANNEL_BYTES = 24
_SUMMED = 256  # chunks of rows whose bias gradients are added at the end


class Sizes:
    """The sizes and kernel shapes that all stages of a layer's backward share.

    The first element of a pair belongs to W x, the second to R h.

    Args:
        calls: The directions of the layer.
        wanted: Which gradients to compute.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        T: Steps.
        N: Rows per step.
        C: Features of the input.
        H: Features of the state.
        rows: Steps times rows.
        dirs: Directions.
        wanted: As given.
        precision: As given.
        half: Whether derivatives are stored in half precision.
        planes: Bytes per code of the input, and of the state.
        weight_planes: Bytes per weight of W, and of R.
        padded: Bytes per row of codes, padded to multiples of 16 for int8 GEMMs.
        columns: Columns of the int32 sums.
        fused: The shape of the kernel that computes derivatives from bytes; None if torch
            multiplies the bytes.
        chunk: Rows whose derivatives a launch computes.
        recurrence: The shape of the recurrence in clusters, or None.
        grid: The shape of the recurrence over the whole GPU, or None. If both are None, each
            step is a launch and a GEMM.
        summed_rows: Rows whose bias gradients a block sums.
        summed: Number of sums of bias gradients, which are added at the end.
    """

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        first = calls[0]
        self.T, self.N, self.C, self.H = first.T, first.N, first.C, first.H
        self.rows, self.dirs = first.T * first.N, len(calls)
        self.wanted, self.precision = wanted, precision
        self.half = precision.half and all(call.fits_half for call in calls)
        w = first.plan.weights
        self.planes = (planes_of(first.plan.x.bits), planes_of(first.plan.h.bits))
        self.weight_planes = (planes_of(w.bits_W), planes_of(w.bits_R))
        x_padded, h_padded = (-(-max(K, 1) // 16) * 16 for K in (self.C, self.H))
        self.padded = (x_padded, h_padded)
        self.columns = tuple(
            -(-(3 * self.H if planes == 1 else 6 * self.H + 1) // 16) * 16
            for planes in self.weight_planes
        )
        clusters = machine.clusters()
        self.fused = None
        if max(*self.planes, *self.weight_planes) == 1:
            tables = first.form.table_bytes
            self.fused = derivatives_shape(
                self.H, self.rows, self.padded, tables, len(clusters) > 1
            )
        row = 4 * max(c * p for c, p in zip(self.columns, self.planes, strict=True))
        chunks = 1 if self.fused else max(1, -(-self.rows * row // _PRODUCT_BYTES))
        self.chunk = -(-self.rows // chunks)
        weight_parts = 2 if precision.exact_weights and self.weight_planes[1] == 2 else 1
        self.recurrence = planner.choose(
            self.H, self.N, self.dirs, precision.planes, weight_parts, clusters
        )
        self.grid: grid_planner.GridShape | None = None
        if precision.operand == 0 and (self.recurrence is None or grid_planner.wanted()):
            self.grid = grid_planner.choose(self.H, self.N, machine.clusters())
            self.recurrence = None if self.grid else self.recurrence
        self.summed_rows = max(64, -(-self.rows // _SUMMED))
        self.summed = -(-self.rows // self.summed_rows)

    @property
    def fragments(self) -> dict[str, int]:
        """The layout of R transposed for the recurrence; 'count' is 0 words if it is not needed."""
        shape = self.recurrence or self.grid
        return shape.layout() if shape else {"count": 0}


@dataclass(frozen=True)
class ProductBuffers:
    """The buffers for W x, or for R h, of a direction.

    Attributes:
        channels: Constants of each channel (3H, bytes).
        weights: Weights as bytes, padded.
        codes: Codes of all steps as bytes, padded.
        sums: int32 sums of a chunk; None if no GEMM of torch computes them.
        real_weights: Weights as operands (3H, features); None if no GEMM needs them.
        real_codes: Codes as operands (T * N, features); None if no gradient needs them.
    """

    channels: Matrix
    weights: Matrix
    codes: Matrix
    sums: Matrix | None
    real_weights: Matrix | None
    real_codes: Matrix | None


@dataclass(frozen=True)
class Buffers:
    """The buffers of a direction.

    Attributes:
        W: Buffers for W x.
        R: Buffers for R h.
        of_R: Derivatives of every element that the recurrence reads.
        of_W: Derivatives that only the gradients of the projections need.
        d: Gradients of the states after each step.
        dWx: Gradients of W x (T * N, 3H), as GEMM operands.
        dRh: Gradients of R h (T * N, 3H), as GEMM operands.
        fragments: R transposed, as the recurrence loads it; None for a recurrence in steps.
        step: The product of a step (N, H); None if the recurrence is one launch.
        partial: Partial sums of bias gradients; None if no bias gradient is wanted.
    """

    W: ProductBuffers
    R: ProductBuffers
    of_R: Matrix
    of_W: Matrix
    d: Matrix
    dWx: Matrix
    dRh: Matrix
    fragments: Matrix | None
    step: Matrix | None
    partial: Matrix | None

    @property
    def dRh_words(self) -> Matrix:
        """`dRh` as int32 words of two bfloat16 operands each."""
        dRh = self.dRh
        return Matrix(dRh.start, dRh.rows, dRh.columns // 2, torch.int32)


def buffers_of(sizes: Sizes, memory: Memory) -> Buffers:
    """Reserve the buffers of a direction."""
    H, rows, wanted, dtype = sizes.H, sizes.rows, sizes.wanted, sizes.precision.dtype

    def take(is_needed: object, rows: int, columns: int, dtype: torch.dtype) -> Matrix | None:
        return _take(memory, rows, columns, dtype) if is_needed else None

    count = sizes.fragments["count"]
    derivatives = 2 if sizes.half else 4
    return Buffers(
        _product_buffers(sizes, memory, 0),
        _product_buffers(sizes, memory, 1),
        _take(memory, rows * H, derivatives, torch.int32),
        _take(memory, rows * H, derivatives, torch.int32),
        _take(memory, rows * H, 1, torch.float32),
        _take(memory, rows, 3 * H, dtype),
        _take(memory, rows, 3 * H, dtype),
        take(count, count, 1, torch.int32),
        take(not count, sizes.N, H, torch.float32),
        take(wanted.bw or wanted.br, 6 * sizes.summed, H, torch.float32),
    )


def _product_buffers(sizes: Sizes, memory: Memory, i: int) -> ProductBuffers:
    H3, wanted, dtype = 3 * sizes.H, sizes.wanted, sizes.precision.dtype
    K, padded, planes = (sizes.C, sizes.H)[i], sizes.padded[i], sizes.planes[i]
    # W for the gradient of x, R for the GEMMs of a recurrence in steps
    is_multiplied = (wanted.x, not sizes.fragments["count"])[i]
    channels = _take(memory, H3, _CHANNEL_BYTES, torch.int8)
    real_weights = _take(memory, H3, K, dtype) if is_multiplied else None
    real_codes = _take(memory, sizes.rows, K, dtype) if (wanted.W, wanted.R)[i] else None
    if sizes.fused:
        weights = _take(memory, H3, padded, torch.int8)
        codes = _take(memory, sizes.rows, padded, torch.int8)
        return ProductBuffers(channels, weights, codes, None, real_weights, real_codes)
    columns = sizes.columns[i]
    weights = _take(memory, columns, padded, torch.int8)
    codes = _take(memory, planes * sizes.rows + FEWEST_ROWS, padded, torch.int8)
    sums = _take(memory, planes * sizes.chunk + FEWEST_ROWS, columns, torch.int32)
    return ProductBuffers(channels, weights, codes, sums, real_weights, real_codes)


def _take(memory: Memory, rows: int, columns: int, dtype: torch.dtype) -> Matrix:
    return Matrix(memory.take(rows * columns * dtype.itemsize), rows, columns, dtype)
