"""Warnings that appear only once per process."""

import sys
import warnings
from types import FrameType

from quant_gru.config.operators import QuantGRUWarning

_said: set[str] = set()


def note_once(message: str, stacklevel: int = 2) -> None:
    """Warn with a `QuantGRUWarning`, unless the same message was given before.

    Args:
        message: Text of the warning.
        stacklevel: As for `warnings.warn`, relative to the caller.
    """
    if message not in _said:
        _said.add(message)
        warnings.warn(message, QuantGRUWarning, stacklevel=stacklevel + 1)


def caller_stacklevel() -> int:
    """Return the `stacklevel` that points a warning of the calling function to the user's code.

    Frames of this library and of torch are skipped, as nn.Module calls forward through torch.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("quant_gru", "torch"):
            return level
        frame, level = frame.f_back, level + 1
    return 1


def forget_notes() -> None:
    """Let every note be given again."""
    _said.clear()
