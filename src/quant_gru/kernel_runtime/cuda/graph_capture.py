"""The current device, and whether a graph is captured: its results exist after a replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from quant_gru.kernel_runtime.errors import KernelError


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(
    device: torch.device, what: str, error: type[Exception] = KernelError
) -> None:
    """Raise an error if a graph is being captured.

    Args:
        device: The device of the work.
        what: Description of the object that cannot be created during capture.
        error: The exception class.
    """
    if capturing(device):
        raise error(
            f"Expected a warm-up run with these shapes before a CUDA graph is captured, got {what}"
        )


def index_of(device: torch.device) -> int:
    """Return the index of a device in native code: that of a GPU, or -1."""
    return device.index if device.type == "cuda" else -1


def current(device: torch.device) -> tuple[Callable[[], int], Callable[[], bool]]:
    """Return functions for native code: the current device, and whether a graph is captured."""
    if device.type == "cuda":
        return torch._C._cuda_getDevice, torch._C._cuda_isCurrentStreamCapturing
    return lambda: -1, lambda: False


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device, if it is not: that takes time."""
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _HERE
    return torch.cuda.device(device)


_HERE: nullcontext[None] = nullcontext()
