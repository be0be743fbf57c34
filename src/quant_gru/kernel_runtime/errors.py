"""The error of the runtime, and its conversion to the error class of a package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KernelError(ValueError):
    """A kernel could not be compiled, cached, loaded or launched."""


@contextmanager
def raised_as(error: type[Exception]) -> Iterator[None]:
    """Convert errors of the runtime to errors of a package.

    Args:
        error: The exception class to raise instead, with the same message.
    """
    try:
        yield
    except KernelError as found:
        raise error(str(found)) from found.__cause__
