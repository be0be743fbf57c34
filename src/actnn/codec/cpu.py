"""Calls of the native code that encodes and decodes on a CPU."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from actnn.codec import _native
from actnn.codec.codes import DTYPES, UNBOUNDED, Bounds, reached

_WORD, _LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def run(
    function: Literal["encode", "decode"],
    x: Tensor,
    data: Tensor,
    params: Tensor,
    rows: int,
    bits: int,
    group: int,
    state: Tensor | None = None,
    tensor: int = 0,
    stochastic: bool = False,
    bits_of: Tensor | None = None,
    ends: Tensor | None = None,
    capacity: int = 0,
    bounds: Bounds = UNBOUNDED,
) -> None:
    """Encode or decode in up to `torch.get_num_threads()` threads.

    Args:
        function: What to do.
        x: The elements, rows * m, which decode writes.
        data: Packed codes, which encode writes.
        params: bfloat16 (rows * groups of a row, 2), which encode writes.
        rows: Number of rows.
        bits: Bits of a code, or 0 for bits per row. Equal bits are one row.
        group: Elements of a group.
        state: int64 (2,), seed and step; for encode.
        tensor: Id of the tensor.
        stochastic: Whether codes are rounded stochastically.
        bits_of: int64 (rows,), the bits of each row if `bits` is 0.
        ends: int64 (rows,), the inclusive sums of `bits_of`.
        capacity: Sum of bits that data can hold if `bits` is 0.
        bounds: Of the elements.
    """
    if not len(params):
        return
    if bits_of is None or ends is None:
        bits_of = ends = torch.tensor([bits])
        capacity = bits
    seed, step = (0, 0) if state is None else state.tolist()
    run = _native.encode if function == "encode" else _native.decode
    run(
        x.data_ptr(),
        data.data_ptr(),
        params.data_ptr(),
        bits_of.data_ptr(),
        ends.data_ptr(),
        rows,
        x.numel() // rows,
        group,
        capacity,
        seed & _LONG,
        step & _WORD,
        tensor,
        DTYPES.index(x.dtype),
        stochastic,
        *(reached(bounds) if function == "encode" else bounds),
        torch.get_num_threads(),
    )
