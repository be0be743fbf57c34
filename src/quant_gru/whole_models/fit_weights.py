"""Weights of calibrated GRUs for which codes of few bits change the products least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant_gru.calibration.batches import run_batch, with_progress
from quant_gru.calibration.fitted_weights import fitted_rows
from quant_gru.calibration.float_run import float_layers, valid
from quant_gru.config import QuantConfig
from quant_gru.errors import CalibrationError
from quant_gru.integer.cell import states_before
from quant_gru.integer.qparams import QParams, weight_scales
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.quantization_state import in_several_processes
from quant_gru.whole_models.observed import Hook, observed_in_float

# Codes of more bits are fine enough.
MOST_BITS = 8

# The operand, weight and bias of each product.
PRODUCTS = (("input.x", "weight.W", 0, 2), ("output.h", "weight.R", 1, 3))

Cell = tuple[int, int]


@dataclass
class Moments:
    """Sums over all steps of an operand: their number, values (K,) and products (K, K)."""

    count: Tensor
    first: Tensor
    second: Tensor

    def covariance(self, centred: bool) -> tuple[Tensor, Tensor]:
        """Return the mean (K,), zero if not `centred`, and the covariance around it (K, K)."""
        mean = self.first / self.count.clamp(min=1)
        if not centred:
            mean = torch.zeros_like(mean)
        return mean, self.second / self.count.clamp(min=1) - mean[:, None] * mean


Operands = dict[tuple[Cell, str], Moments]


def operands(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    batches: Iterable[Any],
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None,
    progress: bool,
) -> dict[str, Operands]:
    """Run the float model, and return the moments of the inputs and states of its GRUs.

    Args:
        model: A model; it runs in eval mode, and the mode is restored.
        grus: Name -> a GRU of it.
        batches: As for `run_batch`.
        forward_fn: As for `run_batch`.
        progress: Whether to show a progress bar (only on a terminal).
    """
    found: dict[str, Operands] = {name: {} for name in grus}
    hooks = {name: _hook(each) for name, each in found.items()}
    with observed_in_float(model, grus, hooks):
        for batch in with_progress(batches, "fitting weights", progress):
            run_batch(model, batch, forward_fn)
    if in_several_processes():
        for name, gru in grus.items():
            _all_reduce(found[name], gru)
    return found


def _hook(found: Operands) -> Hook:
    def observe(gru: QuantGRU, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        sequence = gru._normalize(given["input"], given.get("hx"))
        weights = gru._float_weights()
        x = sequence.x.detach().to(weights[0][0].W.dtype)
        states = sequence.h0.double()

        def add_input(layer: int, direction: int, values: dict[str, Tensor]) -> None:
            _add(found, ((layer, direction), "input.x"), values["input.x"])

        def add_states(layer: int, direction: int, out: Tensor) -> None:
            first = states[layer * len(weights[0]) + direction]
            before = states_before(out, first, direction == 1)
            _add(found, ((layer, direction), "output.h"), valid(before, sequence.lengths))

        float_layers(x, sequence.h0, sequence.lengths, weights, add_input, add_states)

    return observe


def _add(found: Operands, key: tuple[Cell, str], rows: Tensor) -> None:
    own = Moments(rows.new_tensor(float(len(rows))), rows.sum(0), rows.T @ rows)
    before = found.get(key)
    if before is not None:
        own = Moments(
            own.count + before.count, own.first + before.first, own.second + before.second
        )
    found[key] = own


def _all_reduce(found: Operands, gru: QuantGRU) -> None:
    """Add the moments of all processes, also of those that the data of this one do not reach."""
    for layer, cells in enumerate(gru._float_weights()):
        for direction, cell in enumerate(cells):
            for name, w in (("input.x", cell.W), ("output.h", cell.R)):
                K = w.shape[1]
                zeros = (w.new_zeros(shape, dtype=torch.float64) for shape in ((), (K,), (K, K)))
                own = found.setdefault(((layer, direction), name), Moments(*zeros))
                for each in (own.count, own.first, own.second):
                    torch.distributed.all_reduce(each)


@torch.no_grad()
def fitted_weight(
    qparams: QParams, w: Tensor, name: str, operand: str, moments: Moments, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Return weights that are codes times scales, and what the bias gains in their place.

    Args:
        qparams: Widths and scales.
        w: (3H, K).
        name: 'weight.W' or 'weight.R'.
        operand: 'input.x' or 'output.h'.
        moments: Of the operand.
        has_bias: Whether there is a bias, which takes the mean error.

    Returns:
        Weights (3H, K) and the change of the bias (3H,), in the dtype of `w`.
    """
    bits = qparams.config[name].bitwidth
    assert bits is not None
    mean, covariance = moments.covariance(has_bias)
    # the operand's own rounding
    noise = qparams.quantizers[operand].scale ** 2 / 12
    covariance = covariance + noise * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
    scales = weight_scales(qparams, name, w)
    each = scales.repeat_interleave(len(w) // len(scales))
    found = fitted_rows(w, each, bits, covariance)
    return found.to(w.dtype), ((w.double() - found) @ mean).to(w.dtype)


def is_fitted(config: QuantConfig, name: str) -> bool:
    """Return whether a weight has so few bits that fitting it helps."""
    bits = config[name].bitwidth
    return bits is not None and bits <= MOST_BITS


@torch.no_grad()
def fit_weights(grus: Mapping[str, QuantGRU], found: Mapping[str, Operands]) -> None:
    """Replace weights of few bits by ones whose codes change the products least, in place.

    On an error nothing has changed.

    Args:
        grus: Name -> a calibrated GRU whose weights are parameters.
        found: Moments of the same names.

    Raises:
        CalibrationError: A weight is computed, as by a parametrization, or is not finite.
    """
    for name, gru in grus.items():
        _check(name, gru)
    for name, gru in grus.items():
        scales = gru._state.scales
        assert scales is not None
        changed = [list(row) for row in scales]
        for layer, cells in enumerate(gru._weights()):
            for direction, tensors in enumerate(cells):
                qparams = changed[layer][direction]
                for operand, weight, at, bias_at in PRODUCTS:
                    w, bias = tensors[at], tensors[bias_at]
                    moments = found[name].get(((layer, direction), operand))
                    if not is_fitted(qparams.config, weight) or moments is None:
                        continue
                    assert w is not None
                    pinned = weight_scales(qparams, weight, w)
                    values, gained = fitted_weight(
                        qparams, w, weight, operand, moments, bias is not None
                    )
                    w.copy_(values)
                    if bias is not None:
                        bias += gained
                    if not qparams.pot:  # a search would not find the same scales again
                        scales_of = {**qparams.pinned, weight: tuple(pinned.tolist())}
                        qparams = replace(qparams, pinned=scales_of)
                changed[layer][direction] = qparams
        gru._state.finish(changed)


def _check(name: str, gru: QuantGRU) -> None:
    """Raise if a weight to fit is computed or not finite."""
    own = {id(each) for each in gru._parameters.values()}
    scales = gru._state.scales
    assert scales is not None
    for cells, row in zip(gru._weights(), scales, strict=True):
        for tensors, qparams in zip(cells, row, strict=True):
            for _, weight, at, bias_at in PRODUCTS:
                if not is_fitted(qparams.config, weight):
                    continue
                for each in (tensors[at], tensors[bias_at]):
                    if each is None:
                        continue
                    if id(each) not in own or not bool(torch.isfinite(each).all()):
                        raise CalibrationError(
                            f"Expected {weight} and its bias to be finite parameters to fit their "
                            f"codes, got one that is computed or not finite (module {name!r})"
                        )
