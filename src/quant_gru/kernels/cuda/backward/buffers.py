"""What stages of a backward hand to each other, in the memory of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels.cuda.backward.final_gemms import Matrix
from quant_gru.kernels.cuda.backward.sizes import FEWEST_ROWS, Sizes

_CHANNEL_BYTES = 24


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
        of_R: Slopes of every element that the recurrence takes.
        of_W: Slopes that only the gradients of the projections take.
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
    slopes = 2 if sizes.half else 4
    return Buffers(
        _product_buffers(sizes, memory, 0),
        _product_buffers(sizes, memory, 1),
        _take(memory, rows * H, slopes, torch.int32),
        _take(memory, rows * H, slopes, torch.int32),
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
