"""Keeps the plan of a module until something it follows from changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import COLD, capturing, refuse_in_capture
from quant_gru.autograd.prepared_step import QuickStep
from quant_gru.execution.layers import Weights
from quant_gru.execution.optimizer_steps import steps
from quant_gru.execution.prepared_call import Quick
from quant_gru.execution.prepared_gpu_call import QuickGPU
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
from quant_gru.kernels.live_weights import LiveWeights

# Threads that end leave their plans behind.
_MOST_LIVE = 32


@dataclass(eq=False)
class _Live:
    """A plan that follows weights in place: one thread's, on one device.

    Attributes:
        plan: The plan.
        cells: What rewrites its parts.
        step: The quick way through calls like the one before.
    """

    plan: GRUPlan
    cells: tuple[LiveWeights, ...]
    step: QuickStep | None = None

    def fits(self, qparams: Sequence[QParams], weights: Sequence[Weights]) -> bool:
        """Whether it is of these quantizers, and of weights of these shapes and places."""
        return len(self.cells) == len(qparams) and all(
            live.qparams is q
            and (W := w[0]) is not None
            and W.shape == live.part.W.shape
            and W.device == live.part.W.device
            for live, q, w in zip(self.cells, qparams, weights, strict=True)
        )


class QuickKeeper:
    """Has the native way through a call, and keeps what captured graphs read.

    Attributes:
        quick: The native way through a whole call, while nothing it follows from has changed.
    """

    def __init__(self) -> None:
        self.quick: Quick | QuickGPU | None = None
        self._captured: list[object] = []  # what replays of graphs read or write

    def drop_quick(self) -> None:
        """Forget the native way through a call; what a captured graph reads of it stays."""
        if isinstance(self.quick, QuickGPU) and self.quick.captured:
            self._captured.append(self.quick)
        self.quick = None

    def keep_if_captured(self, plan: GRUPlan) -> GRUPlan:
        """The same plan, kept where a graph is captured: replays read it, whatever is forgotten."""
        if capturing(plan.cells[0][0].weights.W.device):
            self._captured.append(plan)
        return plan


class PlanCache(QuickKeeper):
    """Frozen parts per device, weight parts per state of the weights.

    While weights may change unseen there is one plan for each thread and device, whose numbers are
    rewritten in place at every use: it says what weights were at the latest. `live.live_of` of a
    weight part gives what rewrites it, `live.settled` a copy that stays.
    """

    def __init__(self) -> None:
        super().__init__()
        # with what they were made of: a backward may ask for the plan of older scales
        self._frozen: dict[tuple[torch.device, int, int], tuple[QParams, FrozenPart]] = {}
        self._weights: dict[tuple[int, int], tuple[QParams, list[Stamp | None], WeightPart]] = {}
        self._live: dict[tuple[int, torch.device], _Live] = {}

    def forget_weights(self) -> None:
        """Forget what follows from the weights."""
        self.drop_quick()
        self._weights.clear()
        for key, live in list(self._live.items()):
            if not _in_a_graph(live):
                self._live.pop(key, None)

    def clear(self) -> None:
        """Forget everything: quantizers have changed."""
        self.drop_quick()
        self._frozen.clear()
        self._weights.clear()
        self._captured += [live for live in self._live.values() if _in_a_graph(live)]
        self._live.clear()

    def step(self, device: torch.device) -> QuickStep | None:
        """The quick way through a call while weights may change unseen; this thread's."""
        live = self._live.get((threading.get_ident(), device))
        if live is None or live.step is None:
            return None
        self.drop_quick()
        self._weights.clear()
        return live.step

    def keep_step(self, device: torch.device, plan: GRUPlan, step: QuickStep) -> None:
        """Keep a quick way of this thread's live plan."""
        live = self._live.get((threading.get_ident(), device))
        if live is not None and live.plan is plan:
            live.step = step

    def plan(
        self,
        qparams: Sequence[Sequence[QParams]],
        weights: Sequence[Sequence[Weights]],
        live: bool,
        dropped: Sequence[Tensor | None] | None = None,
        p: float = 0.0,
    ) -> GRUPlan:
        """The plan of all layers and directions.

        Args:
            qparams: [layer][direction] -> quantizers and tables.
            weights: [layer][direction] -> W, R, bw, br.
            live: Whether weights may change unseen (training): the plan is then the same object
                each time, its weight parts rewritten in place.
            dropped: bool (3H, H) of each cell in turn, codes of R that become 0 while weights are
                live, or None.
            p: Their probability.
        """
        if live:
            return self._live_plan(qparams, weights, dropped, p)
        found = stack(
            [
                [
                    CellPlan(
                        self._frozen_part(q, w, layer, direction),
                        self._weight_part(q, w, layer, direction),
                    )
                    for direction, (q, w) in enumerate(zip(*pair, strict=True))
                ]
                for layer, pair in enumerate(zip(qparams, weights, strict=True))
            ]
        )
        return self.keep_if_captured(found)

    def _live_plan(
        self,
        qparams: Sequence[Sequence[QParams]],
        weights: Sequence[Sequence[Weights]],
        dropped: Sequence[Tensor | None] | None,
        p: float,
    ) -> GRUPlan:
        self.drop_quick()
        self._weights.clear()
        every_q = [q for layer in qparams for q in layer]
        every_w = [w for layer in weights for w in layer]
        W = every_w[0][0]
        assert W is not None
        key = (threading.get_ident(), W.device)
        found = self._live.get(key)
        if found is None or not found.fits(every_q, every_w):
            if found is not None and _in_a_graph(found):
                self._captured.append(found)
            found = self._live[key] = self._make_live(qparams, weights)
            self._drop_oldest()
        masks = dropped or [None] * len(found.cells)
        for live, (W, R, bw, br), mask in zip(found.cells, every_w, masks, strict=True):
            assert W is not None
            assert R is not None
            live.update(W, R, bw, br, mask, p)
        return found.plan

    def _make_live(
        self, qparams: Sequence[Sequence[QParams]], weights: Sequence[Sequence[Weights]]
    ) -> _Live:
        cells: list[LiveWeights] = []
        plans: list[list[CellPlan]] = []
        for layer, pair in enumerate(zip(qparams, weights, strict=True)):
            plans.append([])
            for direction, (q, w) in enumerate(zip(*pair, strict=True)):
                W, R = w[:2]
                assert W is not None
                assert R is not None
                live = LiveWeights(q, self._frozen_part(q, w, layer, direction), W, R)
                cells.append(live)
                plans[-1].append(CellPlan(live.frozen, live.part))
        return _Live(stack(plans), tuple(cells))

    def _drop_oldest(self) -> None:
        """Keep no more plans than threads can be at work."""
        idle = [key for key, live in list(self._live.items()) if not _in_a_graph(live)]
        for key in idle[:-_MOST_LIVE]:
            self._live.pop(key, None)

    def _frozen_part(self, q: QParams, w: Weights, layer: int, direction: int) -> FrozenPart:
        assert w[0] is not None
        key = (w[0].device, layer, direction)
        kept = self._frozen.get(key)
        if kept is None or kept[0] is not q:
            refuse_in_capture(w[0].device, COLD)
            kept = self._frozen[key] = (q, build_frozen(q, w[0].device))
        return kept[1]

    def _weight_part(self, q: QParams, w: Weights, layer: int, direction: int) -> WeightPart:
        key = (layer, direction)
        kept = self._weights.get(key)
        if kept and kept[0] is q and all(map(Stamp.matches, kept[1], w)):
            return kept[2]
        W, R, bw, br = w
        assert W is not None
        assert R is not None
        part = build_weights(q, W, R, bw, br)
        unseen = any(each is not None and each.is_inference() for each in w)
        if unseen or capturing(W.device):
            # inference tensors keep no version, so a change of them would go unseen; what a graph
            # computes is there only after it has run
            self._weights.pop(key, None)
        else:
            stamps = [None if each is None else Stamp(each) for each in w]
            self._weights[key] = (q, stamps, part)
        return part


def _in_a_graph(live: _Live) -> bool:
    """Whether replays of a captured graph write it: its memory must not go to others."""
    return any(cell.captured for cell in live.cells)


class Stamp:
    """A tensor's storage and version: what tells whether it changed.

    Steps of optimizers count as changes: fused ones leave the version as it is. The alias keeps the
    storage alive, so that its address cannot be given to another.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version
        # integers are no optimizer's
        self.steps = steps.count if tensor.is_floating_point() else None

    def matches(self: Stamp | None, tensor: Tensor | None) -> bool:
        """Whether `tensor` is unchanged; None stands for an absent bias."""
        if self is None or tensor is None:
            return self is None and tensor is None
        return (
            not tensor.is_inference()
            and tensor.data_ptr() == self.alias.data_ptr()
            and tensor._version == self.version
            and (self.steps is None or steps.count == self.steps)
            and tensor.shape == self.alias.shape
            and tensor.dtype == self.alias.dtype
            and tensor.device == self.alias.device
        )
