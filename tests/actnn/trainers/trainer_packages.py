"""Packages that train models, imported without the network; a test that lacks one is skipped."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # models are made from configuration objects
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _import_torchvision() -> None:
    """Import torchvision without its compiled operators, if there is one.

    Most of these packages import it. The one of PyPI fails beside a CPU build of PyTorch, because
    its operators are missing, which no test needs.
    """
    library: Any = torch.library.Library
    names = "impl", "_register_fake"
    originals = {name: getattr(library, name) for name in names}

    def quiet(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except RuntimeError:
                return None

        return call

    for name, function in originals.items():
        setattr(library, name, quiet(function))
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        pass
    finally:
        for name, function in originals.items():
            setattr(library, name, function)


def package(name: str) -> ModuleType:
    """Import a package, or skip the test."""
    _import_torchvision()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name.partition(".")[0]:
            raise
        pytest.skip(f"needs {name}, which the extra 'ci' installs")
