"""The float GRU step by step, in float64, with the real values of every operator.

In float64, the order of sums changes a value by 1e-15. Observers round values to float32, so that
they see the same values on every machine and device, and in the C++ library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.errors import CalibrationError
from quant_gru.integer.cell import states_before

# Values of an operator per block. This bounds the memory and is enough for efficient observers.
_VALUES = 1 << 19


@dataclass(frozen=True)
class FloatWeights:
    """The weights of one layer and direction as PyTorch stores them: rows reset, update, candidate.

    Attributes:
        W: (3H, C).
        R: (3H, H).
        bw: (3H,) or None.
        br: (3H,) or None.
    """

    W: Tensor
    R: Tensor
    bw: Tensor | None
    br: Tensor | None

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> FloatWeights:
        """Return the weights in a dtype, and on a device if one is given."""
        W, R, *biases = (
            None if each is None else each.to(device or each.device, dtype)
            for each in (self.W, self.R, self.bw, self.br)
        )
        assert W is not None
        assert R is not None
        return FloatWeights(W, R, *biases)


def float_layers(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Sequence[FloatWeights]],
    observe: Callable[[int, int, dict[str, Tensor]], None],
    finished: Callable[[int, int, Tensor], None] | None = None,
) -> None:
    """Run the float GRU layer by layer, without dropout, autocast and gradients.

    Args:
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,), or None if all rows have T steps.
        weights: [layer][direction] -> float weights.
        observe: Called with layer, direction and the values of every operator, for each block of
            steps in the order of processing: operator name -> float64 (P, C) for input.x, (P, 3H)
            for matmul.Wx and matmul.Rh (rows reset, update, candidate), otherwise (P, H). P is the
            number of valid steps of all sequences in the block, by step and sequence.
        finished: Called with layer, direction and the states (T, N, H) after each step, float64.
            Outside its length, a row keeps its state.

    Raises:
        CalibrationError: `x` does not have the dtype of the weights.
    """
    expected = weights[0][0].W.dtype
    if x.dtype != expected:
        raise CalibrationError(
            f"Expected input to have the dtype of the weights, {expected}, got {x.dtype}"
        )
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x, states = x.double(), iter(h0.double())
        for layer, cells in enumerate(weights):
            outputs = []
            for direction, cell in enumerate(cells):
                h = next(states)
                out = x.new_empty((*x.shape[:2], h.shape[-1]))
                for values in _blocks(cell.to(torch.float64), x, h, lengths, direction == 1, out):
                    observe(layer, direction, values)
                if finished is not None:
                    finished(layer, direction, out)
                outputs.append(out)
            x = torch.cat(outputs, dim=-1)


def valid(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the valid steps of (T, N, ..) as rows (P, ..)."""
    index = _valid_rows(range(x.shape[0]), lengths)
    return x.flatten(0, 1) if index is None else x.flatten(0, 1)[index]


def _valid_rows(steps: range, lengths: Tensor | None) -> Tensor | None:
    """Return the numbers (P,) of the valid steps of all sequences; None if all are valid."""
    if lengths is None:
        return None
    t = torch.arange(steps.start, steps.stop, device=lengths.device)
    return (t[:, None] < lengths).flatten().nonzero().squeeze(1)


def _blocks(
    w: FloatWeights, x: Tensor, h: Tensor, lengths: Tensor | None, reverse: bool, out: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Run one layer and direction from state `h`, and yield the values of each block of steps.

    `out` (T, N, H) becomes the states after each step. Outside its length, a row keeps its state.
    """
    T, N, H = out.shape
    size = max(1, _VALUES // max(1, N * H))
    starts = range(0, max(1, T), size)
    R = w.R.t().contiguous()
    bias = w.R.new_zeros(()) if w.br is None else w.br
    for start in reversed(starts) if reverse else starts:
        steps = range(start, min(start + size, T))
        inputs, after = x[start : steps.stop], out[start : steps.stop]
        Wx = torch.nn.functional.linear(inputs, w.W, w.bw)
        Rh, first = torch.empty_like(Wx), h
        # views of each step: making them inside of the loop takes as long as small products
        Wx_rz, Wx_g = (part.unbind() for part in Wx.split((2 * H, H), dim=-1))
        Rh_rz, Rh_g = (part.unbind() for part in Rh.split((2 * H, H), dim=-1))
        Rh_steps, states = Rh.unbind(), after.unbind()
        for t in reversed(steps) if reverse else steps:
            i = t - start
            torch.addmm(bias, h, R, out=Rh_steps[i])
            r, z = (Wx_rz[i] + Rh_rz[i]).sigmoid_().split(H, dim=1)
            g = torch.addcmul(Wx_g[i], r, Rh_g[i]).tanh_()
            new = torch.lerp(g, h, z)
            h = new if lengths is None else torch.where((lengths > t)[:, None], new, h)
            states[i].copy_(h)
        found = _operators(inputs, Wx, Rh, states_before(after, first, reverse), after)
        index = _valid_rows(steps, lengths)
        for name, value in found.items():
            found[name] = value.flatten(0, 1) if index is None else value.flatten(0, 1)[index]
        yield found


def _operators(
    x: Tensor, Wx: Tensor, Rh: Tensor, before: Tensor, after: Tensor
) -> dict[str, Tensor]:
    """Return the values of every operator at all steps of a block."""
    Wx_r, Wx_z, Wx_g = Wx.chunk(3, dim=-1)
    Rh_r, Rh_z, Rh_g = Rh.chunk(3, dim=-1)
    z_pre, r_pre = Wx_z + Rh_z, Wx_r + Rh_r
    z, r = torch.sigmoid(z_pre), torch.sigmoid(r_pre)
    rRh = r * Rh_g
    g_pre = Wx_g + rRh
    g = torch.tanh(g_pre)
    return {
        "input.x": x,
        "output.h": after,
        "matmul.Wx": Wx,
        "matmul.Rh": Rh,
        "gate.z_pre": z_pre,
        "gate.z_out": z,
        "gate.r_pre": r_pre,
        "gate.r_out": r,
        "gate.g_pre": g_pre,
        "gate.g_out": g,
        "op.rRh": rRh,
        "op.old_contrib": z * before,
        "op.new_contrib": (1 - z) * g,
    }
