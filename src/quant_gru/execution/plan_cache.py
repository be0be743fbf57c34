"""Caches the plan of a module until its quantizers or weights change."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.execution.layers import Weights
from quant_gru.execution.prepared_call import PreparedCall
from quant_gru.execution.weight_guard import steps
from quant_gru.integer.plan import (
    CellPlan,
    FrozenPart,
    GRUPlan,
    WeightPart,
    build_frozen,
    stack,
)
from quant_gru.integer.qparams import QParams
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture
from quant_gru.kernels.live_weights import LiveWeights, quantize_weights

# Limit of cached plans: threads that end leave their plans in the cache.
_MOST_LIVE = 32


@dataclass(eq=False)
class _Live:
    """A plan whose weight parts are updated in place, for one thread on one device.

    Attributes:
        plan: The plan.
        cells: The objects that rewrite its weight parts.
        prepared: State shared by its calls.
    """

    plan: GRUPlan
    cells: tuple[LiveWeights, ...]
    prepared: PreparedCall | None = None

    @property
    def is_updating(self) -> bool:
        """Whether its thread is updating it: a signal handler or finalizer has interrupted that."""
        for cell in self.cells:
            if cell.lock.locked():
                return True
        return False

    def fits(self, qparams: Sequence[QParams], weights: Sequence[Weights]) -> bool:
        """Return whether the plan has these quantizers, and weights of these shapes and devices."""
        return len(self.cells) == len(qparams) and all(
            live.qparams is q
            and w[0].shape == live.part.W.shape
            and w[0].device == live.part.W.device
            for live, q, w in zip(self.cells, qparams, weights, strict=True)
        )


class CallKeeper:
    """Holds the shared state of calls with unchanged weights, and the memory of captured graphs.

    Attributes:
        prepared: Shared state of calls of the current plan; None before the first call.
        in_graphs: The same for calls as operators of a graph, which have another list of weights.
    """

    def __init__(self) -> None:
        self.prepared: PreparedCall | None = None
        self.in_graphs: PreparedCall | None = None
        self._captured: list[object] = []  # memory that replays of graphs read or write

    def forget_settled(self) -> None:
        """Forget everything that belongs to one state of the weights."""
        raise NotImplementedError

    def drop_prepared(self) -> None:
        """Forget the shared state of calls, except what a captured graph reads."""
        if self.prepared is not None and self.prepared.captured:
            self._captured.append(self.prepared)
        self.prepared = self.in_graphs = None

    def keep(self, prepared: PreparedCall) -> None:
        """Keep the shared state of calls of the current plan, if its guard can detect changes."""
        self.drop_prepared()
        self.prepared = prepared if prepared.is_kept else None

    def keep_if_captured(self, plan: GRUPlan) -> GRUPlan:
        """Return the plan; keep it if a graph is captured, as replays read it after any reset."""
        if capturing(plan.cells[0][0].weights.W.device):
            self._captured.append(plan)
        return plan


class PlanCache(CallKeeper):
    """Caches frozen parts per device, and weight parts per state of the weights.

    While weights may change undetected, there is one plan for each thread and device. Its numbers
    are rewritten in place at every use and follow the latest weights. `live.live_of` of a weight
    part returns the object that rewrites it, `live.settled` a copy that does not change.
    """

    def __init__(self) -> None:
        super().__init__()
        # each with the QParams it was built from: a backward may need the plan of older scales
        self._frozen: dict[tuple[torch.device, int, int], tuple[QParams, FrozenPart]] = {}
        self._weights: dict[tuple[int, int], tuple[QParams, list[Stamp | None], WeightPart]] = {}
        self._live: dict[tuple[int, torch.device], _Live] = {}

    def forget_weights(self) -> None:
        """Forget everything that depends on the weights."""
        self.forget_settled()
        for key, live in list(self._live.items()):
            if not _in_a_graph(live):
                self._live.pop(key, None)

    def clear(self) -> None:
        """Forget everything, after a change of the quantizers."""
        self.drop_prepared()
        self._frozen.clear()
        self._weights.clear()
        self._captured += [live for live in self._live.values() if _in_a_graph(live)]
        self._live.clear()

    def kept(self, device: torch.device, live: bool) -> PreparedCall | None:
        """Return the shared state of the last call. The caller has to check that it still holds.

        Args:
            device: Device of the weights.
            live: As for `plan`.
        """
        if not live:
            return None if self.prepared is None or self.prepared.live else self.prepared
        found = self._live.get((threading.get_ident(), device))
        if found is None or found.prepared is None or found.is_updating:
            return None
        self.forget_settled()
        self.prepared = found.prepared
        return found.prepared

    def keep(self, prepared: PreparedCall) -> None:
        """Keep the shared state of calls of the current plan, if its guard can detect changes."""
        if not prepared.live:
            super().keep(prepared)
            return
        device = prepared.plan.cells[0][0].weights.W.device
        live = self._live.get((threading.get_ident(), device))
        if live is not None and live.plan is prepared.plan:
            live.prepared = self.prepared = prepared if prepared.is_kept else None

    def forget_settled(self) -> None:
        """Forget everything that belongs to one state of the weights."""
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
        """Return the plan of all layers and directions.

        Args:
            qparams: [layer][direction] -> quantizers and tables.
            weights: [layer][direction] -> W, R, bw, br.
            live: Whether weights may change undetected (training). The plan is then the same object
                each time, with weight parts that are rewritten in place.
            dropped: bool (3H, H) of each cell in turn, codes of R that become 0 if `live`; or None.
            p: Drop probability.
        """
        if live:
            return self._live_plan(qparams, weights, dropped, p)
        found = stack(
            [
                [
                    self._cell(q, w, layer, direction)
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
        self.forget_settled()
        every_q = [q for layer in qparams for q in layer]
        every_w = [w for layer in weights for w in layer]
        key = (threading.get_ident(), every_w[0][0].device)
        found = self._live.get(key)
        if found is not None and found.is_updating:
            # the interrupted call goes on with its numbers, so this call gets its own
            found = self._make_live(qparams, weights)
        elif found is None or not found.fits(every_q, every_w):
            if found is not None and _in_a_graph(found):
                self._captured.append(found)
            found = self._live[key] = self._make_live(qparams, weights)
            self._drop_oldest()
        masks = dropped or [None] * len(found.cells)
        for live, (W, R, bw, br), mask in zip(found.cells, every_w, masks, strict=True):
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
                live = LiveWeights(q, self._frozen_part(q, w, layer, direction), w[0], w[1])
                cells.append(live)
                plans[-1].append(CellPlan(live.frozen, live.part))
        return _Live(stack(plans), tuple(cells))

    def _drop_oldest(self) -> None:
        """Keep no more plans than there can be active threads."""
        idle = [key for key, live in list(self._live.items()) if not _in_a_graph(live)]
        for key in idle[:-_MOST_LIVE]:
            self._live.pop(key, None)

    def _frozen_part(self, q: QParams, w: Weights, layer: int, direction: int) -> FrozenPart:
        key = (w[0].device, layer, direction)
        kept = self._frozen.get(key)
        if kept is None or kept[0] is not q:
            refuse_in_capture(w[0].device, COLD)
            kept = self._frozen[key] = (q, build_frozen(q, w[0].device))
        return kept[1]

    def _cell(self, q: QParams, w: Weights, layer: int, direction: int) -> CellPlan:
        frozen = self._frozen_part(q, w, layer, direction)
        return CellPlan(frozen, self._weight_part(q, frozen, w, (layer, direction)))

    def _weight_part(
        self, q: QParams, frozen: FrozenPart, w: Weights, key: tuple[int, int]
    ) -> WeightPart:
        kept = self._weights.get(key)
        if kept and kept[0] is q and all(map(Stamp.matches, kept[1], w)):
            return kept[2]
        W, R, bw, br = w
        unseen = any(map(Tensor.is_inference, [each for each in w if each is not None]))
        if unseen or capturing(W.device):
            # Inference tensors have no version, so a change of them would be missed. Results of a
            # captured graph exist only after it has run.
            self._weights.pop(key, None)
            return quantize_weights(q, frozen, W, R, bw, br)
        # before the part: another thread may change weights while it is built
        stamps = [None if each is None else Stamp(each) for each in w]
        part = quantize_weights(q, frozen, W, R, bw, br)
        self._weights[key] = (q, stamps, part)
        return part


def _in_a_graph(live: _Live) -> bool:
    """Return whether replays of a captured graph write to it, so that it must stay allocated."""
    return any(cell.captured for cell in live.cells)


class Stamp:
    """The storage, version and a sample of the contents of a tensor, to detect changes.

    Optimizer steps count as changes, because fused optimizers do not raise the version. The alias
    keeps the storage alive, so that its address cannot be reused. Contents are compared on a CPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = tensor._version
        # optimizers do not change integers
        self.steps = steps.count if tensor.is_floating_point() else None
        readable = tensor.device.type == "cpu" and tensor.is_contiguous()
        self.content = _native.ContentSample(tensor.data_ptr(), tensor.nbytes) if readable else None

    def matches(self: Stamp | None, tensor: Tensor | None) -> bool:
        """Return whether `tensor` is unchanged; None represents an absent bias."""
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
            and (self.content is None or self.content.unchanged())
        )
