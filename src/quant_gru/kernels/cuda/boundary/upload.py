"""Numbers of the host on a GPU, as arguments of launches: pinned memory and a copy take longer."""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.kernel_runtime.cuda.tensor_launch import tensor_launch

_MOST = 496  # as in upload.cu
_UploadC = structure(
    "UploadC", to=ctypes.c_void_p, count=ctypes.c_int64, numbers=ctypes.c_int64 * _MOST
)
_KERNEL = Kernel.of("boundary/upload", "upload", {})


class Upload:
    """Copies numbers to a GPU on its current stream. Threads may share it.

    Args:
        machine: The GPU that runs the kernel.
        device: The device of the copies.
    """

    def __init__(self, machine: Device, device: torch.device) -> None:
        self._arguments: Any = _UploadC()
        grid, fields = Grid((1, 1), 512), ("to", "count")
        self._launch = tensor_launch(machine, device, [(_KERNEL, grid)], self._arguments, fields)
        self._device = device
        self._numbers = ctypes.addressof(self._arguments.numbers)
        self._lock = threading.Lock()

    def __call__(self, numbers: ctypes.Array[Any]) -> Tensor:
        """Return a copy, without a device sync.

        Args:
            numbers: 64-bit integers.
        """
        count, start = len(numbers), ctypes.addressof(numbers)
        made = torch.empty(count, dtype=torch.int64, device=self._device)
        to = made.data_ptr()
        with self._lock:
            for at in range(0, count, _MOST):
                part = min(_MOST, count - at)
                ctypes.memmove(self._numbers, start + 8 * at, 8 * part)
                self._launch(to + 8 * at, part)
        return made


upload_on = cache(Upload)
"""Return the object of a machine and a device, made at their first use."""
