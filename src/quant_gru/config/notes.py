"""Things worth saying once: warnings that do not repeat within a process."""

import sys
import warnings
from types import FrameType

from quant_gru.config.operators import QuantGRUWarning

_said: set[str] = set()


def note_once(message: str, stacklevel: int = 2) -> None:
    """Warn with a `QuantGRUWarning`, unless this very message was given before.

    Args:
        message: What to say.
        stacklevel: As for `warnings.warn`, seen from the caller.
    """
    if message not in _said:
        _said.add(message)
        warnings.warn(message, QuantGRUWarning, stacklevel=stacklevel + 1)


def caller_stacklevel() -> int:
    """The `stacklevel` at which a warning of the calling function points to the user's code.

    Frames of this library and of torch, through which nn.Module calls forward, are passed over.
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
