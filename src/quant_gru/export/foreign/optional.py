"""Imports of optional packages, with an error that says how to install a missing one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quant_gru._errors import QuantGRUError


def needed(package: str, purpose: str) -> Any:
    """Import and return an optional package.

    Args:
        package: Name of the package, the same in Python and on PyPI.
        purpose: What needs it, for the error.

    Raises:
        QuantGRUError: It is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise QuantGRUError(
            f"Expected the package {package!r} for {purpose}, got none ({error}); run "
            f"pip install {package}"
        ) from None
