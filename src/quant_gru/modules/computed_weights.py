"""Weights that hooks of torch.nn.utils compute before each call: pruning, weight and spectral norm.

Between calls such a weight may be older than what it is computed from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


def computes_weights(hook: Any) -> bool:
    """Return whether a forward pre-hook computes a weight, and does nothing else."""
    return isinstance(hook, BasePruningMethod | SpectralNorm | WeightNorm)


def compute_weights(module: torch.nn.Module) -> None:
    """Compute the weights of a module as its next call in eval mode would, without a graph."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if computes_weights(hook)]
    if not hooks:
        return
    training = module.training
    module.training = False  # spectral norm takes a step of its iteration in training
    try:
        with torch.no_grad():
            for hook in hooks:
                hook(module, ())
    finally:
        module.training = training
