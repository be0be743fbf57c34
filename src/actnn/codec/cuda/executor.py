"""Launches of the kernels that encode and decode."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actnn._errors import ActNNError
from actnn.codec.codes import DTYPES
from actnn.codec.noise import RUN
from kernel_runtime.cuda import driver
from kernel_runtime.cuda.ctypes_structs import structure
from kernel_runtime.cuda.disk_cache import DiskCache
from kernel_runtime.cuda.launch import Grid, Kernel, Machine
from kernel_runtime.cuda.sources import Sources

_CUDA = Path(__file__).parent
SOURCES = Sources(
    _CUDA,
    (
        ("actnn/codec/cuda/codec.cuh", _CUDA / "codec.cuh"),
        ("actnn/codec/c99/group.h", _CUDA.parent / "c99" / "group.h"),
    ),
    ActNNError,
    DiskCache("ACTNN_CACHE", "actnn"),
)
"""The CUDA sources of this package."""

_Pointer, _Long = ctypes.c_void_p, ctypes.c_int64
CodecC: Any = structure(
    "CodecC",
    **dict.fromkeys("x data params state bits ends".split(), _Pointer),
    **dict.fromkeys("rows m groups group capacity tensor".split(), _Long),
)
_THREADS, _WARPS = 256, 8
_MOST_CHUNKS = 16  # that the registers of a lane can hold
_VECTOR_BYTES = 16
_MOST_IN_TILES = 1 << 35  # elements: 2^32 blocks of noise


@cache
def kernel_of(
    function: str, dtype: torch.dtype, bits: int, group: int, stochastic: bool, tiles: bool
) -> tuple[Kernel, int, int]:
    """Choose a kernel.

    Args:
        function: 'encode' or 'decode'.
        dtype: dtype of the elements.
        bits: Bits of a code, or 0 for bits per row.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        tiles: Whether every row begins at a multiple of 16 bytes, and of two runs, and there are
            fewer than 2^32 blocks of noise.

    Returns:
        The kernel, the groups that a warp handles, and bytes of shared memory of a block.
    """
    chunks = group // RUN
    if not tiles or chunks % 2 or chunks > _MOST_CHUNKS:
        chunks = 0
    macros = {"REAL": DTYPES.index(dtype), "BITS": bits, "CHUNKS": chunks}
    groups = 1
    if chunks:
        groups = 8 if dtype.itemsize == 2 else 4
    shared = 0
    if function == "encode":
        macros["STOCHASTIC"] = int(stochastic)
        if chunks:
            shared = _WARPS * groups * (chunks + 1) * RUN
    return Kernel.of(function, function, macros), groups, shared


def run(
    function: str,
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
    machine: Machine | None = None,
) -> None:
    """Encode or decode on the current stream.

    Args:
        function: 'encode' or 'decode'.
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
        machine: The machine that runs the kernel; None for the GPU of x.

    Raises:
        ActNNError: Codes or parameters do not begin at a multiple of 4 bytes, or the kernel cannot
            be compiled or run.
    """
    groups = len(params)
    if not groups:
        return
    address, m = x.data_ptr(), x.numel() // rows
    tiles = address % _VECTOR_BYTES == 0 and rows * m < _MOST_IN_TILES
    if rows > 1:
        tiles = tiles and m % (2 * RUN) == 0
    kernel, groups_of_warp, shared = kernel_of(function, x.dtype, bits, group, stochastic, tiles)
    data_address, params_address = data.data_ptr(), params.data_ptr()
    if (data_address | params_address) % 4:
        raise ActNNError("Expected codes and parameters to begin at multiples of 4 bytes")
    arguments = CodecC(
        address,
        data_address,
        params_address,
        None if state is None else state.data_ptr(),
        None if bits_of is None else bits_of.data_ptr(),
        None if ends is None else ends.data_ptr(),
        rows,
        m,
        groups // rows,
        group,
        capacity,
        tensor,
    )
    if machine is None:
        machine = driver.machine_of(x.device, SOURCES)
    warps = rows * -(-(groups // rows) // groups_of_warp)
    grid = Grid((-(-warps // _WARPS), 1), _THREADS, shared_bytes=shared)
    machine.launch(kernel, grid, arguments)
