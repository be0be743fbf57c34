"""Checks for CUDA graph capture: results of captured work exist only after a replay."""

from __future__ import annotations

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
