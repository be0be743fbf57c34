"""Plans of operators: a registry from parameter tensors to the objects that build plans."""

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
        cache: Cache of the plans.

    Attributes:
        keeper: The cache.
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
        """Return the plan of all layers and directions; arguments as for `PlanCache.plan`."""
        cells = _nested(weights, len(self._qparams))
        return self.keeper.plan(self._qparams, cells, live, dropped, p)


Source: TypeAlias = LivePlans | FrozenPlans

_sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def keep(parameters: Tensor, source: Source) -> None:
    """Register the source of plans for a parameter tensor, for the lifetime of the tensor."""
    _sources[parameters] = source


def source_of(parameters: Tensor, weights: Sequence[Tensor]) -> Source:
    """Return the source of plans of a parameter tensor, by default built from its document."""
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
    """Run a call in native code, with gradients off; return None if the call is not supported.

    Args:
        source: The source of plans.
        weights: As for the operators.
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.

    Returns:
        Output and last states, as for `run_real`.
    """
    # replays of a captured graph read a plan that is kept for them
    if capturing(x.device):
        return None
    keeper = source if isinstance(source, FrozenPlans) else source.keeper
    prepared = keeper.in_graphs
    if prepared is None or not prepared.holds(weights):
        # computed weights are new tensors in each call
        if not all(isinstance(w, Parameter) or not w.is_floating_point() for w in weights):
            return None
        plan = source.plan(weights, False)
        prepared = keeper.in_graphs = prepare(plan, [weights], weights, torch.float32)
    return prepared.start(weights, x, h0, lengths, False)


def has_bias(weights: Sequence[Tensor]) -> bool:
    """Return whether a flat list of weights has biases."""
    return len(weights) > 2 and weights[2].dim() == 1


def _nested(weights: Sequence[Tensor], layers: int) -> list[list[Weights]]:
    """Convert a flat list to [layer][direction] -> W, R, bw, br."""
    size = 4 if has_bias(weights) else 2
    flat: list[Weights] = [
        (*weights[i : i + size], *(None,) * (4 - size))  # type: ignore[misc]
        for i in range(0, len(weights), size)
    ]
    D = len(flat) // layers
    return [flat[i : i + D] for i in range(0, len(flat), D)]
