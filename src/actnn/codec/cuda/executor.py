"""Launches of the kernels that encode and decode."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actnn.codec.codes import DTYPES, UNBOUNDED, Bounds, reached
from actnn.codec.noise import RUN
from actnn.errors import ActNNError
from quant_gru.kernel_runtime._native import TensorLaunch
from quant_gru.kernel_runtime.cuda import driver
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernel_runtime.cuda.tensor_launch import tensor_launch

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
    **dict.fromkeys("rows m groups tiles group capacity tensor".split(), _Long),
    **dict.fromkeys("lowest highest".split(), ctypes.c_float),
)
VARYING = tuple("x data params state bits ends capacity tensor".split())
"""What differs between the launches for tensors of one size."""

SumsC: Any = structure("SumsC", given=_Pointer, bits=_Pointer, ends=_Pointer, rows=_Long)
_THREADS, _WARPS = 256, 8
# runs of which a lane has a part: those that hide the latency of memory, and the most
_FULL_CHUNKS, _MOST_CHUNKS = 8, 16
_VECTOR_BYTES = 16
MOST_IN_TILES = 1 << 35  # elements: 2^32 blocks of noise


class Chosen(NamedTuple):
    """A kernel and the shape of its launch.

    Attributes:
        kernel: The kernel.
        tile: Groups that a warp handles at once, or 0 if it handles one.
        shared_bytes: Shared memory of a block.
    """

    kernel: Kernel
    tile: int
    shared_bytes: int


@cache
def kernel_of(
    function: str, dtype: torch.dtype, bits: int, group: int, stochastic: bool, tiles: bool
) -> Chosen:
    """Choose a kernel.

    Args:
        function: 'encode' or 'decode'.
        dtype: dtype of the elements.
        bits: Bits of a code, or 0 for bits per row.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        tiles: Whether every row begins at a multiple of 16 bytes, and of two runs, and there are
            fewer than 2^32 blocks of noise.
    """
    chunks = group // RUN
    joined = 1 + chunks % 2
    while 2 * joined * chunks <= _FULL_CHUNKS:
        joined *= 2
    if not tiles or joined * chunks > _MOST_CHUNKS:
        chunks, joined = 0, 1
    macros = {"REAL": DTYPES.index(dtype), "BITS": bits, "CHUNKS": chunks, "JOINED": joined}
    sets = 8 if dtype.itemsize == 2 else 4
    shared = 0
    if function == "encode":
        macros["STOCHASTIC"] = int(stochastic)
        shared = _WARPS * sets * (max(joined * chunks, _FULL_CHUNKS) + 1) * RUN
    return Chosen(Kernel.of(function, function, macros), sets * joined if chunks else 0, shared)


def _launch(
    function: str,
    dtype: torch.dtype,
    bits: int,
    group: int,
    stochastic: bool,
    tiles: bool,
    rows: int,
    m: int,
    device: torch.device,
    bounds: Bounds = UNBOUNDED,
    machine: Device | None = None,
) -> TensorLaunch:
    """Return a launch for tensors of one size, which takes the values of `VARYING`.

    Args:
        function: 'encode' or 'decode'.
        dtype: dtype of the elements.
        bits: Bits of a code, or 0 for bits per row.
        group: Elements of a group.
        stochastic: Whether codes are rounded stochastically.
        tiles: See `kernel_of`.
        rows: Number of rows.
        m: Elements of a row.
        device: The device of the tensors.
        bounds: Of the elements.
        machine: The machine that runs the kernel; None for the GPU of the tensors.
    """
    chosen = kernel_of(function, dtype, bits, group, stochastic, tiles)
    groups = -(-m // group)
    tiles_of_row = m // (chosen.tile * group) if chosen.tile else 0
    warps = rows * (groups - tiles_of_row * max(chosen.tile - 1, 0))
    grid = Grid((-(-warps // _WARPS), 1), _THREADS, shared_bytes=chosen.shared_bytes)
    arguments = CodecC(rows=rows, m=m, groups=groups, tiles=tiles_of_row, group=group)
    arguments.lowest, arguments.highest = reached(bounds) if function == "encode" else bounds
    if machine is None:
        machine = driver.machine_of(device, SOURCES)
    return tensor_launch(machine, device, [(chosen.kernel, grid)], arguments, VARYING)


launch_of: Callable[..., TensorLaunch] = lru_cache(maxsize=4096)(_launch)


def in_tiles(x: Tensor) -> bool:
    """Whether a warp can handle several groups of a tensor at once, see `kernel_of`."""
    return x.data_ptr() % _VECTOR_BYTES == 0 and x.numel() < MOST_IN_TILES


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
    bounds: Bounds = UNBOUNDED,
    machine: Device | None = None,
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
        bounds: Of the elements.
        machine: The machine that runs the kernel; None for the GPU of x.

    Raises:
        ActNNError: Codes or parameters do not begin at a multiple of 4 bytes, or the kernel cannot
            be compiled or run.
    """
    n = x.numel()
    if not n:
        return
    if (data.data_ptr() | params.data_ptr()) % 4:
        raise ActNNError("Expected codes and parameters to begin at multiples of 4 bytes")
    tiles = in_tiles(x)
    m = n
    if rows > 1:
        m = n // rows
        tiles = tiles and m % (2 * RUN) == 0
    shape = (function, x.dtype, bits, group, stochastic, tiles, rows, m)
    start = launch_of(*shape, x.device, bounds, machine)
    start(x, data, params, state, bits_of, ends, capacity, tensor)


def sums_of(bits: Tensor, machine: Device | None = None) -> tuple[Tensor, Tensor]:
    """Clamp bits of rows and sum them, on the current stream.

    Args:
        bits: Integers (rows,), at least one.
        machine: The machine that runs the kernel; None for the GPU of the bits.

    Returns:
        Bits in 1..8 and their inclusive sums, int64 (rows,).
    """
    if bits.dtype not in (torch.int32, torch.int64):
        bits = bits.to(torch.int64)
    bits = bits.contiguous()
    found, ends = torch.empty((2, len(bits)), dtype=torch.int64, device=bits.device).unbind()
    kernel = Kernel.of("sum_bits", "sum_bits", {"LONG": int(bits.dtype == torch.int64)})
    arguments = SumsC(bits.data_ptr(), found.data_ptr(), ends.data_ptr(), len(bits))
    if machine is None:
        machine = driver.machine_of(bits.device, SOURCES)
    machine.launch(kernel, Grid((1, 1), _THREADS, shared_bytes=8 * _THREADS), arguments)
    return found, ends
