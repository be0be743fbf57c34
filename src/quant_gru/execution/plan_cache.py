"""Keeps the plan of a module until something it follows from changes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.execution.layers import Weights
from quant_gru.execution.optimizer_steps import steps
from quant_gru.execution.prepared_call import PreparedCall
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
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture
from quant_gru.kernels.live_weights import LiveWeights

# Threads that end leave their plans behind.
_MOST_LIVE = 32


@dataclass(eq=False)
class _Live:
    """A plan that follows weights in place: one thread's, on one device.

    Attributes:
        plan: The plan.
        cells: What rewrites its parts.
        prepared: What its calls share.
    """

    plan: GRUPlan
    cells: tuple[LiveWeights, ...]
    prepared: PreparedCall | None = None

    def fits(self, qparams: Sequence[QParams], weights: Sequence[Weights]) -> bool:
        """Whether it is of these quantizers, and of weights of these shapes and places."""
        return len(self.cells) == len(qparams) and all(
            live.qparams is q
            and (W := w[0]) is not None
            and W.shape == live.part.W.shape
            and W.device == live.part.W.device
            for live, q, w in zip(self.cells, qparams, weights, strict=True)
        )


class CallKeeper:
    """Has what calls of one state of the weights share, and keeps what captured graphs read.

    Attributes:
        prepared: That of the plan at hand; None before the first call.
        in_graphs: The same for calls that come as operators of a graph, whose weights are another
            list.
    """

    def __init__(self) -> None:
        self.prepared: PreparedCall | None = None
        self.in_graphs: PreparedCall | None = None
        self._captured: list[object] = []  # what replays of graphs read or write

    def drop_prepared(self) -> None:
        """Forget what calls share; what a captured graph reads of it stays."""
        if self.prepared is not None and self.prepared.captured:
            self._captured.append(self.prepared)
        self.prepared = self.in_graphs = None

    def keep(self, prepared: PreparedCall) -> None:
        """Keep what calls of the plan at hand share, where its guard can tell how long it holds."""
        self.drop_prepared()
        self.prepared = prepared if prepared.is_kept else None

    def keep_if_captured(self, plan: GRUPlan) -> GRUPlan:
        """The same plan, kept where a graph is captured: replays read it, whatever is forgotten."""
        if capturing(plan.cells[0][0].weights.W.device):
            self._captured.append(plan)
        return plan


class PlanCache(CallKeeper):
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
        self._forget_settled()
        for key, live in list(self._live.items()):
            if not _in_a_graph(live):
                self._live.pop(key, None)

    def clear(self) -> None:
        """Forget everything: quantizers have changed."""
        self.drop_prepared()
        self._frozen.clear()
        self._weights.clear()
        self._captured += [live for live in self._live.values() if _in_a_graph(live)]
        self._live.clear()

    def kept(self, device: torch.device, live: bool) -> PreparedCall | None:
        """What calls share, as the last of them has left it; whether it holds is to be asked.

        Args:
            device: Where the weights are.
            live: As for `plan`.
        """
        if not live:
            return self.prepared
        found = self._live.get((threading.get_ident(), device))
        if found is None or found.prepared is None:
            return None
        self._forget_settled()
        return found.prepared

    def keep(self, prepared: PreparedCall) -> None:
        """Keep what calls of the plan at hand share, where its guard can tell how long it holds."""
        if not prepared.live:
            super().keep(prepared)
            return
        device = prepared.plan.cells[0][0].weights.W.device
        live = self._live.get((threading.get_ident(), device))
        if live is not None and live.plan is prepared.plan:
            live.prepared = prepared if prepared.is_kept else None

    def _forget_settled(self) -> None:
        """Forget what is of one state of the weights: they may change unseen."""
        self.drop_prepared()
        self._weights.clear()

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
        self._forget_settled()
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
        unseen = any(each is not None and each.is_inference() for each in w)
        if unseen or capturing(W.device):
            # inference tensors keep no version, so a change of them would go unseen; what a graph
            # computes is there only after it has run
            self._weights.pop(key, None)
            return build_weights(q, W, R, bw, br)
        # before the part: another thread may change weights while it is built
        stamps = [None if each is None else Stamp(each) for each in w]
        part = build_weights(q, W, R, bw, br)
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
            and tensor.layout is self.alias.layout
            and tensor.data_ptr() == self.alias.data_ptr()
            and tensor._version == self.version
            and (self.steps is None or steps.count == self.steps)
            and tensor.shape == self.alias.shape
            and tensor.stride() == self.alias.stride()
            and tensor.dtype == self.alias.dtype
            and tensor.device == self.alias.device
        )
