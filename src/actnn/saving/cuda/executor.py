"""Launches of the kernels for masks, activations, dropout, windows and rows of norms."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    (("actnn/saving/cuda/pointwise.cuh", _CUDA / "pointwise.cuh"),),
    ActNNError,
    DiskCache("ACTNN_CACHE", "actnn"),
)
"""The CUDA sources of the pointwise kernels."""

PointwiseC: Any = structure(
    "PointwiseC",
    **dict.fromkeys("x y bits seed".split(), ctypes.c_void_p),
    **dict.fromkeys("n tensor".split(), ctypes.c_int64),
    **dict.fromkeys("low high slope".split(), ctypes.c_float),
)
WindowsC: Any = structure(
    "WindowsC",
    **dict.fromkeys("indices offsets".split(), ctypes.c_void_p),
    **dict.fromkeys("n inner".split(), ctypes.c_int64),
    **dict.fromkeys("inside outside kernel stride padding dilation".split(), ctypes.c_int32 * 3),
)
RowsC: Any = structure(
    "RowsC",
    **dict.fromkeys("x mean scale parameters scratch".split(), ctypes.c_void_p),
    **dict.fromkeys("groups outer rows inner parts".split(), ctypes.c_int64),
    **dict.fromkeys("eps most least".split(), ctypes.c_float),
)


class Limits(NamedTuple):
    """The limit of the mean square (x - mean)^2 scale^2 of a row.

    Attributes:
        eps: What is added to the variance in the scale; 0 if it is not known.
        most: Its multiple of the mean square of an exact row, 1 - eps scale^2.
        least: The least mean square of an exact row.
    """

    eps: float
    most: float
    least: float


class RowSizes(NamedTuple):
    """The sizes of a tensor that is (outer, rows, inner) in memory.

    Elements of a row are (outer, inner).
    """

    outer: int
    rows: int
    inner: int


REAL = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_EACH, _THREADS = 8, 256
_PART, _BLOCKS, _MOST_PARTS = 1 << 13, 1024, 256  # elements of a block, blocks, parts of a row
_STEPS = 64  # blocks of 'largest_steps'
_SOURCE = {"rectify": "masks", "pass": "masks", "restore": "masks", "dropout": "dropout"}
_SOURCE |= {"slopes": "slopes", "times": "slopes"}


@cache
def kernel_of(
    function: str, dtype: torch.dtype, aligned: bool, kind: int = 0, width: int = 0
) -> Kernel:
    """Return a kernel.

    Args:
        function: 'rectify', 'pass', 'restore', 'dropout', 'slopes' or 'times'.
        dtype: dtype of the elements.
        aligned: Whether all tensors begin at a multiple of 16 bytes.
        kind: Of rectifier or activation, see the kernels.
        width: Bits of a code of 'slopes' and 'times'.
    """
    macros = {"REAL": REAL[dtype], "ALIGNED": int(aligned)}
    source = _SOURCE[function]
    if source != "dropout":
        macros["KIND"] = kind
    if source == "slopes":
        macros["BITS"] = width
    return Kernel.of(source, function, macros)


@cache
def _runs_on(device: torch.device) -> bool:
    return driver.missing(device) is None


def available(x: Tensor) -> bool:
    """Whether the kernels can run on a tensor."""
    return x.is_cuda and x.dtype in REAL and _runs_on(x.device)


def windows_available(x: Tensor) -> bool:
    """Whether the kernels for windows can run on the device of a tensor."""
    return x.is_cuda and _runs_on(x.device)


def run(
    function: str,
    x: Tensor,
    y: Tensor | None,
    *,
    bits: Tensor | None = None,
    seed: Tensor | None = None,
    low: float = 0.0,
    high: float = 0.0,
    slope: float = 0.0,
    kind: int = 0,
    width: int = 0,
    tensor: int = 0,
    machine: Device | None = None,
) -> None:
    """Run a kernel on the current stream.

    Args:
        function: See `kernel_of`.
        x: Dense, n elements in storage order.
        y: The result, of the same layout; None if only bits are wanted.
        bits: uint8 (ceil(n / 8),), lowest bit first; or `width` times as much, codes.
        seed: int64: (1,) of dropout, or (2,), seed and step of noise.
        low: See the kernels.
        high: See the kernels.
        slope: See the kernels.
        kind: See `kernel_of`.
        width: See `kernel_of`.
        tensor: Id of the tensor, for noise.
        machine: The machine that runs the kernel; None for the GPU of x.
    """
    n = x.numel()
    if not n:
        return
    aligned = not (x.data_ptr() | (0 if y is None else y.data_ptr())) % 16
    of = (function, x.dtype, aligned, kind, width)
    _launch_of(of, n, low, high, slope, x.device, machine)(x, y, bits, seed, tensor)


def _launch(
    of: tuple[str, torch.dtype, bool, int, int],
    n: int,
    low: float,
    high: float,
    slope: float,
    device: torch.device,
    machine: Device | None,
) -> TensorLaunch:
    """Return a launch for tensors of one size: a function of x, y, bits, seed and tensor.

    `of` has the arguments of `kernel_of`: a kernel takes longer to look up.
    """
    if machine is None:
        machine = driver.machine_of(device, SOURCES)
    arguments = PointwiseC(n=n, low=low, high=high, slope=slope)
    grid = Grid((-(-n // (_EACH * _THREADS)), 1), _THREADS)
    varying = ("x", "y", "bits", "seed", "tensor")
    return tensor_launch(machine, device, [(kernel_of(*of), grid)], arguments, varying)


_launch_of: Callable[..., TensorLaunch] = lru_cache(maxsize=4096)(_launch)


def run_windows(
    function: str,
    indices: Tensor,
    offsets: Tensor,
    inner: int,
    sizes: Sequence[Sequence[int]],
    machine: Device | None = None,
) -> None:
    """Convert the positions of a max pool.

    Args:
        function: 'window_offsets' writes offsets, 'window_indices' writes indices.
        indices: int64, positions in the input, in storage order.
        offsets: uint8, positions in the window, of the same layout.
        inner: 1, or the number of channels if they are last in memory.
        sizes: Of input, output, kernel, stride, padding and dilation, three numbers each.
        machine: The machine that runs the kernel; None for the GPU of the tensors.
    """
    n = indices.numel()
    if not n:
        return
    if machine is None:
        machine = driver.machine_of(indices.device, SOURCES)
    triples = [(ctypes.c_int32 * 3)(*each) for each in sizes]
    arguments = WindowsC(indices.data_ptr(), offsets.data_ptr(), n, inner, *triples)
    kernel = Kernel.of("windows", function, {})
    machine.launch(kernel, Grid((-(-n // _THREADS), 1), _THREADS), arguments)


def limit_rows(
    x: Tensor,
    mean: Tensor | None,
    scale: Tensor,
    parameters: Tensor,
    groups: int,
    sizes: RowSizes,
    limits: Limits,
    machine: Device | None = None,
) -> None:
    """Limit the mean square of normalized rows, in place, on the current stream.

    Rows above the limit are scaled to it, as differences from their mean. Others keep their bits.

    Args:
        x: The tensor.
        mean: float32, of each row; None for 0.
        scale: float32, 1 / sqrt(variance + eps) of each row.
        parameters: Base and step of each group of codes of x, bfloat16.
        groups: The number of these groups.
        sizes: Those of x.
        limits: The limit.
        machine: The machine that runs the kernels; None for the GPU of x.
    """
    if not x.numel():
        return
    launch, size = _rows_launch_of(x.dtype, sizes, limits, x.device, machine)
    launch(x, mean, scale, parameters, x.new_empty(size, dtype=torch.float32), groups)


def _rows_launch(
    dtype: torch.dtype,
    sizes: RowSizes,
    limits: Limits,
    device: torch.device,
    machine: Device | None,
) -> tuple[TensorLaunch, int]:
    """Return a launch and the size of its scratch.

    It is a function of x, mean, scale, parameters, scratch and groups.
    """
    if machine is None:
        machine = driver.machine_of(device, SOURCES)
    outer, rows, inner = sizes
    together = 32 if inner == 1 and outer > 1 else 1  # rows of a block
    blocks = -(-rows // together)
    parts = -(-outer * inner * together // _PART)
    parts = min(parts, -(-_BLOCKS // blocks), _MOST_PARTS)
    functions = {}
    if parts > 1 and limits.eps:
        functions["largest_steps"] = (_STEPS, 1)
    if parts > 1:
        functions["row_squares"] = (blocks, parts)
    functions["limit_rows"] = (blocks, parts)
    macros = {"REAL": REAL[dtype], "ROWS": together}
    launches = [
        (Kernel.of("rows", function, macros), Grid(each, _THREADS, shared_bytes=4 * _THREADS))
        for function, each in functions.items()
    ]
    arguments = RowsC(parts=parts, **sizes._asdict(), **limits._asdict())
    varying = ("x", "mean", "scale", "parameters", "scratch", "groups")
    return tensor_launch(machine, device, launches, arguments, varying), _STEPS + parts * rows


_rows_launch_of: Callable[..., tuple[TensorLaunch, int]] = lru_cache(maxsize=4096)(_rows_launch)
