"""Where operators take plans from: a parameter tensor stands for what makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.execution.frozen_plan import FrozenPlans
from quant_gru.execution.layers import Weights
from quant_gru.execution.plan_cache import PlanCache
from quant_gru.execution.prepared_call import prepare
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.parameters import document as params


class LivePlans:
    """Plans that follow real weights.

    Args:
        qparams: [layer][direction] -> quantizers and tables.
        cache: Where plans are kept.

    Attributes:
        keeper: As given.
    """

    def __init__(self, qparams: Sequence[Sequence[QParams]], cache: PlanCache) -> None:
        self._qparams = qparams
        self.keeper = cache

    def plan(
        self,
        weights: Sequence[Tensor],
        live: bool,
        dropped: Sequence[Tensor] | None = None,
        p: float = 0.0,
    ) -> GRUPlan:
        """The plan of all layers and directions; see `PlanCache.plan` for the arguments."""
        cells = _nested(weights, len(self._qparams))
        return self.keeper.plan(self._qparams, cells, live, dropped, p)


Source: TypeAlias = LivePlans | FrozenPlans

_sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def keep(parameters: Tensor, source: Source) -> None:
    """Say where the plans of a parameter tensor come from, as long as the tensor lives."""
    _sources[parameters] = source


def source_of(parameters: Tensor, weights: Sequence[Tensor]) -> Source:
    """What makes the plans of a parameter tensor, from the document in it where nobody has said."""
    found: Source | None = _sources.get(parameters)
    if found is None:
        document = params.from_tensor(parameters, "a graph")
        document.pop("batch_first", None)
        cells = params.from_document(document, "a graph").cells
        real = weights[0].is_floating_point()
        found = LivePlans(cells, PlanCache()) if real else FrozenPlans(cells)
        keep(parameters, found)
    return found


def run_prepared(
    source: Source, weights: Sequence[Tensor], x: Tensor, h0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Run a call in native code, where no gradient is on; None where the call is of another kind.

    Args:
        source: What makes the plans.
        weights: As the operators take them.
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.

    Returns:
        Output and last states, as `run_real`.
    """
    # replays of a graph that is captured read a plan that is kept for them
    if capturing(x.device):
        return None
    keeper = source if isinstance(source, FrozenPlans) else source.keeper
    prepared = keeper.in_graphs
    if prepared is None or not prepared.holds(weights):
        # what is computed is new in each call
        if not all(isinstance(w, Parameter) or not w.is_floating_point() for w in weights):
            return None
        prepared = prepare(
            lambda: source.plan(weights, False), [weights], weights, torch.float32
        )
        keeper.in_graphs = prepared
    return prepared.start(weights, x, h0, lengths, False)


def has_bias(weights: Sequence[Tensor]) -> bool:
    """Whether a flat list of weights has biases."""
    return len(weights) > 2 and weights[2].dim() == 1


def _nested(weights: Sequence[Tensor], layers: int) -> list[list[Weights]]:
    """[layer][direction] -> W, R, bw, br, of a flat list."""
    size = 4 if has_bias(weights) else 2
    flat: list[Weights] = [
        (*weights[i : i + size], *(None,) * (4 - size))  # type: ignore[misc]
        for i in range(0, len(weights), size)
    ]
    D = len(flat) // layers
    return [flat[i : i + D] for i in range(0, len(flat), D)]
