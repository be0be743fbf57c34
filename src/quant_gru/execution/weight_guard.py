"""A guard that detects changes of a module's weights.

Fused optimizers change weights without raising their version, so that a count of optimizer steps
stands for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from quant_gru.kernels import _native

_KINDS = (Tensor, torch.nn.Parameter)


class Steps:
    """A count that every optimizer of the process increments, starting with the first query."""

    def __init__(self) -> None:
        self._count = 0
        self._watched = False

    @property
    def count(self) -> int:
        """Steps so far. A cached result from another count may belong to other weights."""
        if not self._watched:
            self._watched = True
            register_optimizer_step_post_hook(self._add)
        return self._count

    def _add(self, *_: Any) -> None:
        self._count += 1


steps = Steps()


class WeightGuard:
    """Compares a module's weights with the weights at its creation.

    Args:
        weights: All weights of the module, in a fixed order. Aliases keep their storage alive, so
            that another tensor cannot get its address.

    Attributes:
        weights: As given.
        native: The guard for native code.
        unchanged: unchanged(current weights) -> whether they are the same tensors with the same
            numbers. Always False for inference tensors, which have no version.
        in_place: in_place(current weights) -> whether they are the same tensors with the same
            addresses and layouts; their numbers may differ.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        # native code identifies weights by their addresses
        self._kept = [w.detach() for w in weights]
        # optimizers do not change integers
        counted = any(w.is_floating_point() for w in weights)
        self.native = _native.WeightGuard(Tensor, weights, steps if counted else None)
        self.unchanged = self.native.unchanged
        self.in_place = self.native.in_place


def guard_of(
    weights: Collection[Tensor | None], used: Iterable[Tensor | None], device: torch.device
) -> WeightGuard | None:
    """Return a guard of all weights of a module; None if it could not detect every change.

    Args:
        weights: All weights of the module.
        used: The tensors that the plan was built from. If they are computed from the module's
            weights, as in parametrizations and pruning, their identity shows no changes.
        device: Required device of the weights.
    """
    found: list[Tensor] = []
    for w in weights:
        if w is None or type(w) not in _KINDS or w.device != device:
            return None
        if w.layout is not torch.strided:
            return None
        found.append(w)
    if not {id(None), *map(id, found)}.issuperset(map(id, used)):
        return None
    return WeightGuard(found)
