"""Imports of optional packages, with an error that says how to install a missing one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quant_gru.errors import QuantGRUError

# Packages that an extra of this library installs.
_EXTRAS = {"onnx": '"quant-gru[onnx]"'}


def needed(package: str, purpose: str) -> Any:
    """Import and return an optional package.

    Args:
        package: Name of the module, that of the package on PyPI before its first dot.
        purpose: What needs it, for the error.

    Raises:
        QuantGRUError: It is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise QuantGRUError(
            f"Expected the package {name!r} for {purpose}, got none ({error}); run "
            f"pip install {_EXTRAS.get(name, name)}"
        ) from None
