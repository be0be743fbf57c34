"""The exceptions and warnings."""

from __future__ import annotations


class ActNNError(ValueError):
    """An argument, a model or a state that actnn does not support. The message says what to do."""


class ActNNWarning(UserWarning):
    """Something that may surprise the user, reported once."""
