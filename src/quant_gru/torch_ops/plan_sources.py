"""Plans of operators: a registry from parameter tensors to the objects that build plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from quant_gru.errors import QuantGRUError
from quant_gru.execution.frozen_plan import FrozenPlans
from quant_gru.execution.layers import Weights
from quant_gru.execution.plan_cache import PlanCache
from quant_gru.execution.prepared_call import prepare
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.parameters import document as params
from quant_gru.parameters.schema import Shape


class LivePlans:
    """Plans that follow real weights.

    Args:
        qparams: [layer][direction] -> quantizers and tables.
        cache: Where plans are kept.
        shape: The GRU they belong to.

    Attributes:
        keeper: As given.
        shape: As given.
    """

    def __init__(
        self, qparams: Sequence[Sequence[QParams]], cache: PlanCache, shape: Shape
    ) -> None:
        self._qparams = qparams
        self.keeper, self.shape = cache, shape

    def plan(
        self,
        weights: Sequence[Tensor],
        live: bool,
        dropped: Sequence[Tensor] | None = None,
        p: float = 0.0,
    ) -> GRUPlan:
        """The plan of all layers and directions; see `PlanCache.plan` for the arguments.

        Raises:
            QuantGRUError: Weights do not fit the shape.
        """
        cells = _nested(weights, self.shape)
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
        read = params.from_document(document, "a graph")
        if weights and not weights[0].is_floating_point():
            found = FrozenPlans(read.cells, read.shape)
        else:
            found = LivePlans(read.cells, PlanCache(), read.shape)
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
        if prepared is not None:
            # parts of the weights have guards of their own, which may see a write later
            keeper.forget_settled()
        prepared = prepare(lambda: source.plan(weights, False), [weights], weights, torch.float32)
        keeper.in_graphs = prepared
    return prepared.start(weights, x, h0, lengths, False)


def has_bias(weights: Sequence[Tensor]) -> bool:
    """Return whether a flat list of weights has biases."""
    return len(weights) > 2 and weights[2].dim() == 1


def check_inputs(
    source: Source, weights: Sequence[Tensor], x: Tensor, h0: Tensor, lengths: Tensor | None
) -> None:
    """Check what an operator was given, whose addresses kernels take.

    Raises:
        QuantGRUError: A tensor does not fit the GRU of the parameters.
    """
    shape = source.shape
    if not weights:
        raise QuantGRUError("Expected weights of each layer and direction, got none")
    like = weights[0]
    if x.dim() != 3 or x.shape[2] != shape.input_size:
        raise QuantGRUError(
            f"Expected x to be of shape (T, N, {shape.input_size}), got {tuple(x.shape)}"
        )
    N = x.shape[1]
    states = (shape.num_layers * shape.directions, N, shape.hidden_size)
    if h0.shape != states:
        raise QuantGRUError(f"Expected h0 to be of shape {states}, got {tuple(h0.shape)}")
    for name, tensor in (("x", x), ("h0", h0)):
        if not tensor.is_floating_point() or tensor.device != like.device:
            raise QuantGRUError(
                f"Expected {name} to be real and on {like.device}, as the weights are, got "
                f"{tensor.dtype} on {tensor.device}"
            )
    if lengths is not None and (
        lengths.shape != (N,) or lengths.dtype != torch.int64 or lengths.device != like.device
    ):
        raise QuantGRUError(
            f"Expected lengths to be of int64 and of shape ({N},) on {like.device}, got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)} on {lengths.device}"
        )


def _nested(weights: Sequence[Tensor], shape: Shape) -> list[list[Weights]]:
    """[layer][direction] -> W, R, bw, br, of a flat list."""
    size = 4 if has_bias(weights) else 2
    L, D, H = shape.num_layers, shape.directions, shape.hidden_size
    if len(weights) != L * D * size:
        raise QuantGRUError(
            f"Expected {L * D * size} weights, {size} of each layer and direction, "
            f"got {len(weights)}"
        )
    flat: list[Weights] = []
    for i in range(0, len(weights), size):
        columns = D * H if i >= D * size else shape.input_size
        expected = ((3 * H, columns), (3 * H, H), (3 * H,), (3 * H,))
        cell = weights[i : i + size]
        for name, w, want in zip(("W", "R", "bw", "br"), cell, expected, strict=False):
            if w.shape != want or w.device != weights[0].device:
                raise QuantGRUError(
                    f"Expected {name} of cell {i // size} to be of shape {want} on "
                    f"{weights[0].device}, got {tuple(w.shape)} on {w.device}"
                )
        flat.append((*cell, *(None,) * (4 - size)))  # type: ignore[arg-type]
    return [flat[i : i + D] for i in range(0, len(flat), D)]
