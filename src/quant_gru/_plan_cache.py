"""Keeps the plan of a module until something it follows from changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru._layers import Weights
from quant_gru._quick import Quick
from quant_gru._quick_gpu import QuickGPU
from quant_gru.integer.plan import (
    CellPlan,
    FrozenPart,
    GRUPlan,
    WeightPart,
    build_frozen,
    build_weights,
    stack,
)
from quant_gru.integer.qparams import QParams


class PlanCache:
    """Frozen parts per device, weight parts per state of the weights.

    Attributes:
        quick: The native way through a whole call, while nothing it follows from has changed.
    """

    def __init__(self) -> None:
        self.quick: Quick | QuickGPU | None = None
        self._frozen: dict[tuple[torch.device, int, int], FrozenPart] = {}
        self._weights: dict[tuple[int, int], tuple[list[Stamp | None], WeightPart]] = {}

    def forget_weights(self) -> None:
        """Forget what follows from the weights."""
        self.quick = None
        self._weights.clear()

    def clear(self) -> None:
        """Forget everything: quantizers have changed."""
        self.quick = None
        self._frozen.clear()
        self._weights.clear()

    def plan(
        self, qparams: Sequence[Sequence[QParams]], weights: Sequence[Sequence[Weights]], live: bool
    ) -> GRUPlan:
        """The plan of all layers and directions.

        Args:
            qparams: [layer][direction] -> quantizers and tables.
            weights: [layer][direction] -> W, R, bw, br.
            live: Whether weights may change unseen (training): their part is always rebuilt.
        """
        if live:
            self.quick = None
        return stack(
            [
                [
                    CellPlan(
                        self._frozen_part(q, w, layer, direction),
                        self._weight_part(q, w, layer, direction, live),
                    )
                    for direction, (q, w) in enumerate(zip(*pair, strict=True))
                ]
                for layer, pair in enumerate(zip(qparams, weights, strict=True))
            ]
        )

    def _frozen_part(self, q: QParams, w: Weights, layer: int, direction: int) -> FrozenPart:
        assert w[0] is not None
        key = (w[0].device, layer, direction)
        if key not in self._frozen:
            self._frozen[key] = build_frozen(q, w[0].device)
        return self._frozen[key]

    def _weight_part(
        self, q: QParams, w: Weights, layer: int, direction: int, live: bool
    ) -> WeightPart:
        key = (layer, direction)
        kept = self._weights.get(key)
        if kept and not live and all(map(Stamp.matches, kept[0], w)):
            return kept[1]
        W, R, bw, br = w
        assert W is not None
        assert R is not None
        part = build_weights(q, W, R, bw, br)
        if live or any(each is not None and each.is_inference() for each in w):
            # inference tensors keep no version, so a change of them would go unseen
            self._weights.pop(key, None)
        else:
            self._weights[key] = ([None if each is None else Stamp(each) for each in w], part)
        return part


class Stamp:
    """A tensor's storage and version: what tells whether it changed.

    The alias keeps the storage alive, so that its address cannot be given to another.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version

    def matches(self: Stamp | None, tensor: Tensor | None) -> bool:
        """Whether `tensor` is unchanged; None stands for an absent bias."""
        if self is None or tensor is None:
            return self is None and tensor is None
        return (
            not tensor.is_inference()
            and tensor.data_ptr() == self.alias.data_ptr()
            and tensor._version == self.version
            and tensor.shape == self.alias.shape
            and tensor.dtype == self.alias.dtype
            and tensor.device == self.alias.device
        )
