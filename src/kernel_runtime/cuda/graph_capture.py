"""CUDA graphs that are being captured: what is computed then is there only after their replay."""

from __future__ import annotations

import torch

from quant_gru._errors import QuantGRUError

COLD = "a plan that has not run yet"


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: what is computed then is there after its replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(device: torch.device, what: str) -> None:
    """Raise where a graph is being captured.

    Args:
        device: Where work is done.
        what: What cannot be made then, in words.

    Raises:
        QuantGRUError: A graph is being captured.
    """
    if capturing(device):
        raise QuantGRUError(
            f"Expected a warm-up run with these shapes before a CUDA graph is captured, got {what}"
        )
