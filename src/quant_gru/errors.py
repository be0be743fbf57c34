"""The exceptions and warnings of quant-gru. One `except QuantGRUError` catches all errors."""

import sys
import warnings
from types import FrameType


class QuantGRUError(ValueError):
    """Base class of all errors of quant-gru about its inputs."""


class ConfigError(QuantGRUError):
    """A configuration or a change of it breaks a rule; names file, operator and field."""


class CalibrationError(QuantGRUError):
    """Statistics are missing, empty or non-finite, or prevent the requested change."""


class ParameterError(QuantGRUError):
    """A parameter file or checkpoint has unusable quantization data."""


class QuantGRUWarning(UserWarning):
    """A warning about valid settings that may not match the user's intent."""


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
