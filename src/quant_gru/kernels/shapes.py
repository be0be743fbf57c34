"""Checks of shapes before kernels get addresses, which tell them nothing of sizes."""

from __future__ import annotations

from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.backward import Tape
from quant_gru.integer.plan import CellPlan


def check_run(
    plan: CellPlan, x: Tensor, h0: Tensor, lengths: Tensor | None, held: Tensor | None
) -> None:
    """Check what `quant_gru.integer.cell.run` takes.

    Raises:
        QuantGRUError: A shape does not match the plan.
    """
    (T, N, C), H = x.shape, plan.hidden_size
    count = N if lengths is None else lengths.numel()
    if plan.input_size != C or h0.shape != (N, H) or count != N:
        raise QuantGRUError(
            f"Expected x of {plan.input_size} features, h0 of shape ({N}, {H}) and {N} lengths, "
            f"got x of {C}, h0 of shape {tuple(h0.shape)} and {count} lengths"
        )
    _check("held", held, (T, N, H))


def check_backward(tape: Tape, grad_out: Tensor | None, grad_last: Tensor | None) -> None:
    """Check what a forward left, and the gradients of its results; None is not checked.

    Raises:
        QuantGRUError: A shape does not match the plan.
    """
    (T, N, _), H = tape.x.shape, tape.plan.hidden_size
    _check("x", tape.x, (T, N, tape.plan.input_size))
    for name, tensor in (("h0", tape.h0), ("grad_last", grad_last)):
        _check(name, tensor, (N, H))
    for name, tensor in (("out", tape.out), ("grad_out", grad_out), ("held", tape.held)):
        _check(name, tensor, (T, N, H))
    for name, tensor in (("lengths", tape.lengths), ("nan", tape.nan)):
        _check(name, tensor, (N,))


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape != shape:
        raise QuantGRUError(f"Expected {name} to be of shape {shape}, got {tuple(tensor.shape)}")
