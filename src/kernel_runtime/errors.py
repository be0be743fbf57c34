"""The error of the runtime, and how it becomes that of a package whose kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class KernelError(ValueError):
    """Kernels cannot be compiled, loaded, launched or kept as they were asked to."""


@contextmanager
def raised_as(error: type[Exception]) -> Iterator[None]:
    """Turn errors of the runtime into those of a package.

    Args:
        error: What is raised in their place, with the same message.
    """
    try:
        yield
    except KernelError as found:
        raise error(str(found)) from found.__cause__
