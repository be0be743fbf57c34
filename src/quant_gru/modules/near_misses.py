"""Attributes that are set under a name that is nearly that of a setting."""

from __future__ import annotations

import difflib
import warnings
from typing import Any

import torch

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
