"""CUDA graphs that are being captured: what is computed then is there only after their replay."""

from __future__ import annotations

import torch

from kernel_runtime.errors import KernelError


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: what is computed then is there after its replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(
    device: torch.device, what: str, error: type[Exception] = KernelError
) -> None:
    """Raise where a graph is being captured.

    Args:
        device: Where work is done.
        what: What cannot be made then, in words.
        error: What is raised.
    """
    if capturing(device):
        raise error(
            f"Expected a warm-up run with these shapes before a CUDA graph is captured, got {what}"
        )
