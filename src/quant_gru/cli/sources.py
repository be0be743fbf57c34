"""Models and data for commands: a function in a Python file that returns both."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quant_gru.errors import QuantGRUError

Loaded = tuple[torch.nn.Module, Any, Callable[[torch.nn.Module, Any], Any] | None]


def load(source: str) -> Loaded:
    """Run the function that a command line names.

    Args:
        source: 'FILE.py:FUNCTION' or 'package.module:FUNCTION'. The function takes no arguments
            and returns a model and batches, or a model, batches and forward_fn.

    Returns:
        The model, the batches as a list, and forward_fn or None.

    Raises:
        QuantGRUError: There is no such file or function, or it returns something else.
    """
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier():
        raise QuantGRUError(f"Expected MODEL to be like FILE.py:FUNCTION, got {source!r}")
    function = _members(place).get(name)
    if not callable(function):
        raise QuantGRUError(f"Expected a function {name!r} in {place!r}, got none")
    found = function()
    if not (isinstance(found, tuple) and len(found) in (2, 3)):
        raise QuantGRUError(
            f"Expected {source!r} to return a model and batches, or these and forward_fn, got "
            f"{type(found).__name__}"
        )
    model, batches, *rest = found
    if not isinstance(model, torch.nn.Module):
        raise QuantGRUError(f"Expected {source!r} to return a module, got {type(model).__name__}")
    return model, batches, rest[0] if rest else None


def _members(place: str) -> dict[str, Any]:
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise QuantGRUError(f"Expected a Python file, got none ({place!r})")
        return runpy.run_path(place)
    try:
        return vars(importlib.import_module(place))
    except ModuleNotFoundError as error:
        raise QuantGRUError(f"Expected a module or a Python file, got {place!r}: {error}") from None
