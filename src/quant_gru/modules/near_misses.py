"""Names that are nearly those of a setting or of an argument."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from quant_gru.config.operators import suggest
from quant_gru.errors import QuantGRUWarning, caller_stacklevel

_SETTINGS = (
    "batch_first",
    "calibrating",
    "calibration_method",
    "config",
    "dropout",
    "export_format",
    "export_mode",
    "learn_scales",
    "percentile_value",
    "precision",
    "recurrent_dropout",
    "stash_bits",
    "training",
    "use_quantization",
    "zoneout",
)
_SIMILAR = 0.8
# torch.ao.quantization writes it to every module
_FOREIGN = ("qconfig",)
# what other libraries, or other functions of this one, call an argument
_MEANT = dict.fromkeys(
    ("preset", "qconfig", "quant_config", "quant_type", "quantization_config"), ("config",)
) | {"bits": ("bitwidth", "config"), "bitwidth": ("config",), "config": ("quant_type",)}


def warn_of_near_miss(module: torch.nn.Module, name: str, value: Any) -> None:
    """Warn if a new attribute has nearly the name of a setting."""
    if name.startswith("_") or isinstance(value, torch.Tensor | torch.nn.Module):
        return
    near = difflib.get_close_matches(name.lower(), _SETTINGS, n=1, cutoff=_SIMILAR)
    if near and name not in (*_SETTINGS, *_FOREIGN):
        warnings.warn(
            f"{type(module).__name__} has no setting {name!r}; did you mean {near[0]!r}?",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def refuse_unknown(function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raise a TypeError for arguments that a function does not have; it names the nearest."""
    for each in unknown:
        found = inspect.signature(function).parameters.values()
        known = [p.name for p in found if p.kind is not p.VAR_KEYWORD and p.name != "self"]
        meant = next((name for name in _MEANT.get(each, ()) if name in known), each)
        path = function.__qualname__.split(".")
        called = path[0] if path[-1] == "__init__" else path[-1]
        raise TypeError(
            f"{called}() got an unexpected keyword argument {each!r}; {suggest(meant, known)}"
        )
