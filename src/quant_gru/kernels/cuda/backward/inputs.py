"""The inputs of one direction of a backward in the form that kernels read, and its precision."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from quant_gru.integer.backward import Tape
from quant_gru.integer.plan import CellPlan, WeightPart
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernel_runtime.cuda.streams import made_on
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.cell import Cell
from quant_gru.kernels.cuda.plan.structure import KINDS
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.shapes import check_backward

# by device; never freed, since captured graphs read them
_zeros: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Precision:
    """How gradients are multiplied.

    Attributes:
        planes: bfloat16 parts of a gradient in the recurrence.
        exact_weights: Whether weights of more than 8 bits are multiplied in two parts, not rounded.
        half: Whether derivatives are stored in half precision.
        operand: Operands of the GEMMs after the recurrence: 0 bfloat16, 1 float32, 2 float64.
    """

    planes: int
    exact_weights: bool
    half: bool
    operand: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of operands."""
        return (torch.bfloat16, torch.float32, torch.float64)[self.operand]


PRECISIONS = {
    "bf16": Precision(1, False, True, 0),
    "tf32": Precision(2, True, False, 1),
    "fp32": Precision(3, True, False, 1),
}
IN_DOUBLE = replace(PRECISIONS["fp32"], operand=2)
"""'fp32' with GEMMs in float64."""


class Call:
    """Tensors and sizes of one direction.

    Args:
        tape: The inputs and outputs of the forward.
        grad_out: Gradient of the dequantized outputs (T, N, H), any strides, or None for zeros.
        grad_last: Gradient of the dequantized last state (N, H), or None for zeros.

    Attributes:
        tensors: The tensors that kernels read besides the weights, by name; None if absent.
        strides: Strides of the input's steps and rows, in values.
    """

    def __init__(self, tape: Tape, grad_out: Tensor | None, grad_last: Tensor | None) -> None:
        plan = self.plan = tape.plan
        x, lengths, held, nan = tape.x, tape.lengths, tape.held, tape.nan
        T, N, C = x.shape
        H = plan.hidden_size
        self.T, self.N, self.C, self.H = T, N, C, H
        check_backward(tape, grad_out, grad_last)
        self.device = x.device
        self.reverse = tape.reverse
        self.numbers = numbers_of(plan)
        self.form = self.numbers.form
        values = x.dtype.is_floating_point
        if values:
            x = _real(x)
            if x.stride(2) != 1:
                x = x.contiguous()
        else:
            x = _as(x, plan.x.container)
        self.strides = x.stride()[:2]
        if grad_out is None:
            grad_out = zero_on(self.device).expand(T, N, H)
        # kernels accept any strides
        self.grad_out = _real(grad_out)
        states = plan.h.container
        self.tensors: dict[str, Tensor | None] = {
            "x": None if values else x,
            "values": x if values else None,
            "h0": _as(tape.h0, states),
            "out": _as(tape.out, states),
            "lengths": None if lengths is None else _as(lengths.to(self.device), torch.int64),
            "held": _as(held, torch.bool),
            "grad_out": self.grad_out,
            "grad_last": _as(grad_last, torch.float32),
            "nan": _as(nan, torch.float32),
        }

    @property
    def key(self) -> tuple[Any, ...]:
        """The properties that directions of the same launch must share."""
        plan, w = self.plan, self.plan.weights
        sizes = (self.T, self.N, self.C, self.H)
        return (*sizes, self.form, plan.x.bits, plan.h.bits, w.bits_W, w.bits_R)

    @property
    def details(self) -> tuple[Any, ...]:
        """The cache key of schedules of a size; quantizers are identified by their identity."""
        w = self.plan.weights
        return (weakref.ref(self.plan.frozen), self.reverse, w.W.dtype, w.R.dtype)

    @property
    def native(self) -> _native.BackwardDirection:
        """The direction as an argument of `_native.layer_backward_of`."""
        w = self.plan.weights
        # schedules outlive calls: they must not keep weights alive
        return Cell(self.plan).native([]), self.reverse, (KINDS[w.W.dtype], KINDS[w.R.dtype])


def weights_of(plan: CellPlan) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors of the weights that kernels read, by name.

    Returns:
        The tensors, and whether all of them are the plan's own. Converted copies must be made again
        when the plan's tensors change.
    """
    w: WeightPart = plan.weights
    (Mx,), (Mh,) = w.Wx.multipliers, w.Rh.multipliers
    given: list[tuple[str, Any, torch.dtype]] = [
        ("W", w.W, w.W.dtype),
        ("R", w.R, w.R.dtype),
        ("s_W", w.scales["weight.W"], torch.float32),
        ("s_R", w.scales["weight.R"], torch.float32),
        ("Bw", w.Bw, torch.int64),
        ("Br", w.Br, torch.int64),
        ("Mx", Mx, torch.int64),
        ("Mh", Mh, torch.int64),
        ("kx", w.Wx.shift, torch.int64),
        ("kh", w.Rh.shift, torch.int64),
    ]
    found: dict[str, Tensor] = {}
    own = True
    for name, tensor, dtype in given:
        assert isinstance(tensor, Tensor)
        found[name] = tensor.to(dtype).contiguous()
        own &= found[name] is tensor
    return found, own


def zero_on(device: torch.device) -> Tensor:
    """Return the zero that replaces an absent gradient of the output."""
    kept = _zeros.get(device)
    if kept is None:
        kept = torch.zeros((), device=device)
        if not capturing(device):
            # a tensor made in a captured graph is valid only after the graph has run
            kept = _zeros.setdefault(device, kept)
            made_on(device)
    return kept


_Given = TypeVar("_Given", Tensor, Tensor | None)


def _as(tensor: _Given, dtype: torch.dtype) -> _Given:
    """Return a contiguous tensor of this dtype."""
    if tensor is None or (tensor.dtype is dtype and tensor.is_contiguous() and not tensor.is_neg()):
        return tensor
    return tensor.detach().to(dtype).contiguous().resolve_neg()


def _real(tensor: Tensor) -> Tensor:
    """Return a float32 tensor with any strides."""
    if tensor.dtype is torch.float32 and not tensor.is_neg():
        return tensor
    return tensor.detach().to(torch.float32).resolve_neg()
