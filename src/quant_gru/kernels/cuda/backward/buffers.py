"""The sizes of a layer's backward, the shapes of the kernels that they lead to, and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernel_runtime.cuda.launch import Machine
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.backward import Wanted
from quant_gru.kernels.cuda.backward import grid_planner, planner
from quant_gru.kernels.cuda.backward.derivatives_planner import choose as derivatives_shape
from quant_gru.kernels.cuda.backward.final_gemms import Matrix
from quant_gru.kernels.cuda.backward.inputs import Call, Precision
from quant_gru.kernels.cuda.plan.structure import planes_of

FEWEST_ROWS = 32
"""Rows of a product of bytes at least: torch._int_mm takes more than 16."""
_PRODUCT_BYTES = 32 << 20  # of the int32 sums of W x, or of R h, at once
_CHANNEL_BYTES = 24
_SUMMED = 256  # chunks of rows whose sums are added in the end


class Sizes:
    """What all stages of a layer's backward have in common.

    Pairs are of W x and of R h.

    Args:
        calls: The directions of the layer.
        wanted: Which gradients to compute.
        precision: How they are multiplied.
        machine: Where kernels run.

    Attributes:
        T: Steps.
        N: Rows of a step.
        C: Features of the input.
        H: Features of the state.
        rows: Steps times rows.
        dirs: Directions.
        wanted: As given.
        precision: As given.
        half: Whether derivatives are kept in half precision.
        planes: Bytes of a code of the input, and of the state.
        weight_planes: Bytes of a weight of W, and of R.
        padded: Features of rows of bytes: multiples of 16, as products of bytes want them.
        columns: Columns of the int32 sums.
        fused: The shape of the one kernel that makes derivatives from bytes; None where torch
            multiplies the bytes.
        chunk: Rows whose derivatives a launch makes.
        recurrence: The shape of the recurrence in clusters, or None.
        grid: The shape of the recurrence over the whole GPU, or None. Where both are None, each
            step is a launch and a product.
        summed_rows: Rows whose bias gradients a block sums.
        summed: Sums of bias gradients, which are added in the end.
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
        """How R, transposed, is laid out for the recurrence; 'count' of 0 words: it is not."""
        shape = self.recurrence or self.grid
        return shape.layout() if shape else {"count": 0}


@dataclass(frozen=True)
class ProductBuffers:
    """What belongs to W x, or to R h, of a direction.

    Attributes:
        channels: Constants of each channel (3H, bytes).
        weights: Weights as bytes, padded.
        codes: Codes of all steps as bytes, padded.
        sums: int32 sums of a chunk; None where no product of torch's makes them.
        real_weights: Weights as operands (3H, features); None where no product needs them.
        real_codes: Codes as operands (T * N, features); None where no gradient needs them.
    """

    channels: Matrix
    weights: Matrix
    codes: Matrix
    sums: Matrix | None
    real_weights: Matrix | None
    real_codes: Matrix | None


@dataclass(frozen=True)
class Buffers:
    """What belongs to a direction.

    Attributes:
        W: Of W x.
        R: Of R h.
        of_R: Derivatives of every element that the recurrence takes.
        of_W: Derivatives that only the gradients of the projections take.
        d: Gradients of the states after each step.
        dWx: Gradients of W x (T * N, 3H), operands.
        dRh: Gradients of R h (T * N, 3H), operands.
        fragments: R, transposed, as the recurrence loads it; None for a recurrence in steps.
        step: The product of a step (N, H); None where the recurrence is one launch.
        partial: Sums of bias gradients of some rows; None where none is wanted.
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
        """`dRh` as words of two operands of bfloat16."""
        dRh = self.dRh
        return Matrix(dRh.start, dRh.rows, dRh.columns // 2, torch.int32)


def buffers_of(sizes: Sizes, memory: Memory) -> Buffers:
    """Take what a direction needs."""
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
    # W for the gradient of x, R for the products of a recurrence in steps
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
