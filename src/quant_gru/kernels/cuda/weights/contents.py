"""Finds writes to weights on a GPU that no version records."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.streams import made_on
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels import _native

_CHUNK, _MOST_TENSORS, _WARPS = 4096, 64, 8  # as in contents.cu
# a look reads at most this, so that it takes little time even of a call of one step
_MOST_BYTES = 4 << 20
_FLAGS = 4096

_PieceC = structure("PieceC", data=ctypes.c_void_p, bytes=ctypes.c_int64, first=ctypes.c_int64)
_ContentsC = structure(
    "ContentsC",
    pieces=_PieceC * _MOST_TENSORS,
    **dict.fromkeys(("hashes", "found"), ctypes.c_void_p),
    **dict.fromkeys(("count", "chunks", "part", "parts", "mark"), ctypes.c_int64),
)
_KERNEL = Kernel.of("weights/contents", "contents", {})
_marks = itertools.count()
_lock = threading.Lock()


class Contents:
    """Hashes of tensors on a GPU at its creation, and launches that compare tensors with them.

    Each look reads a part of the tensors: equally spaced chunks of all of them, at most 4 MiB. A
    number of looks reads everything.

    Args:
        tensors: Contiguous tensors on one device, which stay allocated as long as this object.
        machine: The GPU that runs the kernel.
        most_bytes: Most bytes of a look.

    Attributes:
        parts: Number of looks that read all bytes.
        found: Address of an int32 in host memory, which a look sets to `mark` if a hash differs.
        mark: A positive number. Objects may share a flag, so each looks for its own mark only.
    """

    def __init__(
        self, tensors: Sequence[Tensor], machine: Device, most_bytes: int = _MOST_BYTES
    ) -> None:
        device = tensors[0].device
        self.mark = next(_marks) % (2**31 - 1) + 1
        with _lock:
            flags = _flags(device.type == "cuda")
        self.found = flags[self.mark % _FLAGS].data_ptr()
        chunks = sum(map(_chunks_of, tensors))
        self.parts = max(1, -(-chunks * _CHUNK // most_bytes))
        self._hashes = torch.empty(chunks, dtype=torch.int64, device=device)
        self._part = Memory()
        self._machine, at = machine, 0
        self._launches: list[Prepared] = []
        for first in range(0, len(tensors), _MOST_TENSORS):
            arguments = self._arguments(tensors[first : first + _MOST_TENSORS], at)
            at += arguments.chunks
            # a prepared launch, because the device may not be the current one
            machine.prepare(_KERNEL, _grid(arguments.chunks), arguments).start(machine.stream())
            arguments.mark, arguments.parts = self.mark, self.parts
            self._part.point(arguments, "part")
            grid = _grid(-(-arguments.chunks // self.parts))
            self._launches.append(machine.prepare(_KERNEL, grid, arguments))
        made_on(device)

    def _arguments(self, tensors: Sequence[Tensor], at: int) -> Any:
        """Return arguments that write the hashes of tensors, the first at index `at`."""
        arguments: Any = _ContentsC()
        arguments.hashes, arguments.found = self._hashes.data_ptr() + 8 * at, self.found
        arguments.count, arguments.parts = len(tensors), 1
        for piece, tensor in zip(arguments.pieces, tensors, strict=False):
            piece.data, piece.bytes = tensor.data_ptr(), tensor.nbytes
            piece.first = arguments.chunks
            arguments.chunks += _chunks_of(tensor)
        return arguments

    def watch(self, guard: _native.WeightGuard) -> None:
        """Let a guard start looks after calls, and report what they find."""
        machine, look = self._machine, self._machine.join(self._launches)
        fields, keep = [self._part.fields], (self, look)
        looks = _native.Steps([look.native], [[0]], fields, machine.raise_for, keep)
        guard.watch(looks, self.found, self.mark, self.parts, machine.stream)


def _chunks_of(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _CHUNK)


def _grid(chunks: int) -> Grid:
    return Grid((-(-chunks // _WARPS), 1), 32 * _WARPS)


@cache
def _flags(pinned: bool) -> Tensor:
    """Return host memory that kernels write. It is never freed, because a kernel may be late."""
    with torch.inference_mode(False):
        return torch.zeros(_FLAGS, dtype=torch.int32, device="cpu", pin_memory=pinned)
