"""Whether a module's weights are those that something was made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from quant_gru.execution.optimizer_steps import steps
from quant_gru.kernels import _native

_KINDS = (Tensor, torch.nn.Parameter)


class WeightGuard:
    """Compares a module's weights with those it was made of.

    A step of any optimizer counts as a change, see `quant_gru.execution.optimizer_steps`.

    Args:
        weights: All weights of the module, in one order. Aliases keep their storage, so that its
            address is not given to another tensor.

    Attributes:
        native: The same for native code.
        unchanged: unchanged(weights now) -> whether they are the same tensors with the same
            numbers. Never so with inference tensors, which have no version.
        in_place: in_place(weights now) -> whether they are the same tensors, where they were and
            laid out as they were; their numbers may differ.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        # native code knows them by their addresses
        self._kept = [(w, w.detach()) for w in weights]
        # integers are no optimizer's
        counted = any(w.is_floating_point() for w in weights)
        self.native = _native.WeightGuard(Tensor, weights, steps if counted else None)
        self.unchanged = self.native.unchanged
        self.in_place = self.native.in_place


def guard_of(
    weights: Collection[Tensor | None], used: Iterable[Tensor | None], device: torch.device
) -> WeightGuard | None:
    """A guard of all weights of a module; None where it could not tell of every change.

    Args:
        weights: All weights of the module.
        used: What a plan was made of. Where that is computed from the module's weights, as
            parametrizations and pruning do, their identity tells nothing.
        device: Where the weights have to be.
    """
    found: list[Tensor] = []
    for w in weights:
        if w is None or type(w) not in _KINDS or w.device != device:
            return None
        if w.layout is not torch.strided:
            return None
        found.append(w)
    known = {id(w) for w in found}
    if not all(w is None or id(w) in known for w in used):
        return None
    return WeightGuard(found)
