"""The float GRU layer by layer, with the states of every step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.calibration.trace import FloatWeights
from quant_gru.integer.reference import states_before


@dataclass(frozen=True)
class FloatRun:
    """The inputs and outputs of one layer and direction of the float GRU.

    Attributes:
        layer: Index of the layer.
        direction: 0 forward, 1 reverse.
        weights: Its weights.
        x: Inputs (T, N, C).
        h0: Initial state (N, H).
        out: States after each step (T, N, H), constant outside the length of a row.
    """

    layer: int
    direction: int
    weights: FloatWeights
    x: Tensor
    h0: Tensor
    out: Tensor

    def rows(self, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, states before and states after the valid steps: (P, C), (P, H), (P, H)."""
        before = states_before(self.out, self.h0, reverse=self.direction == 1)
        return valid(self.x, lengths), valid(before, lengths), valid(self.out, lengths)


def valid(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the valid steps of (T, N, ..) as rows (P, ..)."""
    if lengths is None:
        return x.flatten(0, 1)
    return x[torch.arange(x.shape[0], device=x.device)[:, None] < lengths]


def float_layers(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Sequence[FloatWeights]],
) -> list[FloatRun]:
    """Run the float GRU layer by layer, without dropout and gradients.

    Args:
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,), or None if all rows have T steps.
        weights: [layer][direction] -> float weights.
    """
    found: list[FloatRun] = []
    x = x.detach()
    with torch.no_grad():
        for layer, cells in enumerate(weights):
            outputs = []
            for direction, w in enumerate(cells):
                state = h0[len(found)].detach().to(x.dtype)
                out = _run_direction(w, x, state, lengths, reverse=direction == 1)
                found.append(FloatRun(layer, direction, w, x, state, out))
                outputs.append(out)
            x = torch.cat(outputs, dim=-1)
    return found


def _run_direction(
    w: FloatWeights, x: Tensor, h0: Tensor, lengths: Tensor | None, reverse: bool
) -> Tensor:
    """Return the states after each step (T, N, H), from nn.GRU's own kernel."""
    if x.shape[1] == 0:
        return x.new_zeros((*x.shape[:2], h0.shape[-1]))
    flat = [each for each in (w.W, w.R, w.bw, w.br) if each is not None]
    order = _processing_order(x.shape[0], lengths, x.shape[1], reverse, x.device)
    with warnings.catch_warnings():
        # weights of one layer and direction of a larger GRU are never one contiguous chunk
        warnings.filterwarnings("ignore", "RNN module weights")
        y = torch.gru(
            _take(x, order), h0[None], flat, w.bw is not None, 1, 0.0, False, False, False
        )[0]
    if lengths is not None:
        valid = torch.arange(x.shape[0], device=x.device)[:, None] < lengths
        last = torch.gather(y, 0, (lengths - 1)[None, :, None].expand(1, *y.shape[1:]))
        # in processing order the valid steps of a row come first, in both directions
        y = torch.where(valid[..., None], y, h0 if reverse else last)
    return _take(y, order)


def _processing_order(
    T: int, lengths: Tensor | None, N: int, reverse: bool, device: torch.device
) -> Tensor | None:
    """Return an index (T, N) that reverses each row within its length, its own inverse.

    It is None for the forward direction.
    """
    if not reverse:
        return None
    t = torch.arange(T, device=device)[:, None].expand(T, N)
    if lengths is None:
        return T - 1 - t
    return torch.where(t < lengths, lengths - 1 - t, t)


def _take(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else torch.gather(x, 0, order[..., None].expand_as(x))
