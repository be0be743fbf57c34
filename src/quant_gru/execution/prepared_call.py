"""The shortest way through an inference call: nothing changed since the last one, native code runs.

A call of a single step lasts a few microseconds, less than it takes to build or even to compare a
plan. What was checked and built once is therefore kept with what tells that it still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from quant_gru.execution.optimizer_steps import Steps, steps
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cpu import executor as cpu

_KINDS = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")


class KeptWeights:
    """All weights of a module, kept so that identity, version and address tell of changes.

    A step of any optimizer counts as one, see `quant_gru.execution.optimizer_steps`.

    Args:
        weights: The weights; aliases keep their storage, so that its address is not given to
            another one.
    """

    def __init__(self, weights: Collection[Tensor]) -> None:
        self._aliases = [w.detach() for w in weights]
        self._stamps = [(w, w._version, w.data_ptr()) for w in weights]
        # integers are no optimizer's
        real = any(w.is_floating_point() for w in weights)
        self._steps = steps.count if real else None

    @property
    def tensors(self) -> list[Tensor]:
        """The weights."""
        return [w for w, _, _ in self._stamps]

    @property
    def count_of_steps(self) -> Steps | None:
        """What counts steps of optimizers, where they may change the weights."""
        return None if self._steps is None else steps

    def hold(self, weights: Collection[Tensor | None]) -> bool:
        """Whether the weights are still those that were given, unchanged.

        Args:
            weights: The module's weights now, in the order they were given in.
        """
        if len(weights) != len(self._stamps):
            return False
        if self._steps is not None and self._steps != steps.count:
            return False
        for w, (kept, version, address) in zip(weights, self._stamps, strict=True):
            if w is not kept or w._version != version or w.data_ptr() != address:
                return False
        return True

    def ask_for_gradient(self) -> bool:
        """Whether a gradient goes to one of them."""
        return any(w.requires_grad for w, _, _ in self._stamps)


def kept_weights(
    weights: Collection[Tensor | None], used: Iterable[Tensor | None], device: torch.device
) -> KeptWeights | None:
    """The weights, where they can tell of every change of the plan; None where they cannot.

    Args:
        weights: All weights of the module.
        used: What the plan was made of. Where that is computed from the module's weights, as
            parametrizations and pruning do, their versions tell nothing.
        device: Where the weights have to be.
    """
    found: list[Tensor] = []
    for w in weights:
        # inference tensors keep no version, so a change of them would go unseen
        if w is None or type(w) not in _KINDS or w.device != device or w.is_inference():
            return None
        # the output has the dtype of the weights
        if w.is_floating_point() and w.dtype != torch.float32:
            return None
        found.append(w)
    known = {id(w) for w in found}
    if not all(w is None or id(w) in known for w in used):
        return None
    return KeptWeights(found)


class Quick:
    """A native stack, and the weights it was made of.

    Args:
        stack: The stack, made for the instruction set in use.
        weights: All weights of the module.
    """

    def __init__(self, stack: cpu.Stack, weights: KeptWeights) -> None:
        # native code knows them by their addresses
        self._weights = weights
        self.start = cpu.quick_of(stack, weights.tensors, weights.count_of_steps).run
        """As `run`; NotImplemented where inputs have to be laid out anew."""
        self.holds = weights.hold
        """holds(weights now) -> whether they are still those that were given, unchanged."""

    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call, if it is of the plain kind.

        Args:
            weights: The module's weights now, in the order they were given in.
            x: What was given as input; taken if float32 (T, N, C), (N, T, C) if `batch_first`, on
                the CPU.
            hx: float32 (states, N, H) or None.
            batch_first: Whether N comes before T.

        Returns:
            As `QuantGRU.forward`; None where the call is of another kind, a weight or
            `QUANT_GRU_CPU` changed, or a gradient may be asked for.
        """
        result = self.start(weights, x, hx, batch_first)
        if result is not NotImplemented:
            return result
        assert isinstance(x, Tensor)
        hx = None if hx is None else hx.contiguous().resolve_neg()
        return self.start(weights, x.contiguous().resolve_neg(), hx, batch_first)


def quick_of(
    plan: GRUPlan, weights: Collection[Tensor | None], used: Iterable[Tensor | None]
) -> Quick | None:
    """The quick way for a plan, if there is one.

    Args:
        plan: The plan.
        weights: All weights of the module.
        used: What the plan was made of.
    """
    kept = kept_weights(weights, used, _CPU)
    if kept is None:
        return None
    variant = cpu.chosen()
    stack = None if variant == cpu.REFERENCE else cpu.stack_of(plan, variant)
    return None if stack is None else Quick(stack, kept)
