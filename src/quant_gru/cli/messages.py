"""Errors and warnings of the command line, each as one clean line on stderr."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from quant_gru.errors import QuantGRUError

WRONG = 2
"""Exit code of a command whose arguments or files are wrong."""


def report(error: Exception) -> None:
    """Print an error to stderr."""
    typer.echo(f"Error: {error}", err=True)


@contextmanager
def one_line_messages() -> Iterator[None]:
    """Report an error of the user's input without a traceback, and warnings without their source.

    Raises:
        typer.Exit: With exit code 2, after an error.
    """
    from quant_gru.kernel_runtime.errors import KernelError

    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except (QuantGRUError, KernelError) as error:
            report(error)
            raise typer.Exit(WRONG) from None


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"Warning: {' '.join(str(message).split())}", err=True)
