"""Things worth saying once: warnings that do not repeat within a process."""

import warnings

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


def forget_notes() -> None:
    """Let every note be given again."""
    _said.clear()
