"""The weights of a GRU module by layer and direction, and whether their changes are seen.

Hooks of torch.nn.utils (pruning, weight and spectral norm) compute weights before each call.
Between calls such a weight may be older than what it is computed from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import Weights
from quant_gru.parameters.schema import Shape

Names = list[list[tuple[str, tuple[int, ...]]]]
"""Names and shapes of W, R, bw, br of each layer and direction in turn."""


def names_of(shape: Shape) -> Names:
    """Return the names and shapes of nn.GRU's parameters."""
    D, C, H = shape.directions, shape.input_size, shape.hidden_size
    return [
        [
            (f"weight_ih_l{layer}{suffix}", (3 * H, D * H if layer else C)),
            (f"weight_hh_l{layer}{suffix}", (3 * H, H)),
            (f"bias_ih_l{layer}{suffix}", (3 * H,)),
            (f"bias_hh_l{layer}{suffix}", (3 * H,)),
        ]
        for layer in range(shape.num_layers)
        for suffix in ("", "_reverse")[:D]
    ]


def weights_of(module: torch.nn.Module, names: Names, directions: int) -> list[list[Weights]]:
    """Return [layer][direction] -> W, R, bw, br of a module.

    Raises:
        QuantGRUError: A weight is missing, of another shape, or sparse.
    """
    parameters = module._parameters
    flat: list[Weights] = []
    for cell in names:
        found: list[Any] = []
        for name, shape in cell:
            # a computed weight (parametrization, pruning) is an attribute, not a parameter
            w = parameters.get(name)
            w = getattr(module, name, None) if w is None else w
            if w is None:
                if len(shape) == 2:
                    raise QuantGRUError(f"Expected {name} to be a tensor, got none")
            # native code reads weights by address, so their shapes must be right
            elif w.shape != shape:
                raise QuantGRUError(f"Expected {name} to be of shape {shape}, got {tuple(w.shape)}")
            elif w.layout is not torch.strided:
                raise QuantGRUError(f"Expected {name} to be a dense tensor, got {w.layout}")
            found.append(w)
        flat.append((found[0], found[1], found[2], found[3]))
    return [flat[i : i + directions] for i in range(0, len(flat), directions)]


def may_change_unseen(module: torch.nn.Module) -> bool:
    """Return whether weights may change without a change of their version.

    Fused optimizers write weights without raising their version, so weights that take part in a
    gradient are never cached. Inference-mode tensors have no version.
    """
    if takes_part_in_a_gradient(module):
        return True
    for w in module._parameters.values():
        if w is not None and w.is_inference():
            return True
    return False


def takes_part_in_a_gradient(module: torch.nn.Module) -> bool:
    """Return whether a call now may be followed by gradients of the weights."""
    if module.training:
        return True
    if not torch.is_grad_enabled():
        return False
    # original weights of parametrizations are parameters of submodules
    own = module.parameters() if module._modules else module._parameters.values()
    return any(w is not None and w.requires_grad for w in own)


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
