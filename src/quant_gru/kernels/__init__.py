"""Executors of plans. Each one returns the same codes as the reference."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the compiled module, with an error that says how to install it."""
    if name != "_native":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module(f"{__name__}._native")
    except ImportError as error:
        raise ImportError(
            f"Expected the compiled module {__name__}._native, got: {error}. Installing quant-gru "
            "builds it, unless QUANT_GRU_PARTS=actnn: run 'python -m pip install --force-reinstall "
            "--no-deps quant-gru', or 'python -m pip install -e .' in the source tree"
        ) from error
