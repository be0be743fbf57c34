"""Calls of the native code that encodes and decodes on a CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from actnn.codec import _native
from actnn.codec.codes import DTYPES, UNBOUNDED, Bounds, reached


@lru_cache(maxsize=4096)
def call_of(
    function: Literal["encode", "decode"],
    dtype: torch.dtype,
    bits: int,
    group: int,
    stochastic: bool,
    rows: int,
    m: int,
    bounds: Bounds = UNBOUNDED,
) -> _native.Call:
    """Return a call for tensors of one size, which takes what `launch_of` on a GPU returns.

    Args:
        function: What to do.
        dtype: dtype of the elements.
        bits: Bits of a code, or 0 for bits per row.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        rows: Number of rows.
        m: Elements of a row.
        bounds: Of the elements.
    """
    encodes = function == "encode"
    sizes = (bits, group, stochastic, rows, m)
    ends = reached(bounds) if encodes else bounds
    return _native.Call(encodes, DTYPES.index(dtype), *sizes, *ends, torch.get_num_threads, Tensor)


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
    sizes = (x.dtype, bits, group, stochastic, rows, x.numel() // rows)
    start = call_of(function, *sizes, bounds)
    start(x, data, params, state, bits_of, ends, capacity, tensor)
