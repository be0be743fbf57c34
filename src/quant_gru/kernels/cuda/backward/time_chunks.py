"""A backward in time chunks, from the last steps to the first, which bounds its memory.

Gates, derivatives and operands of all steps of a chunk exist at once, about 40 bytes per unit and
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from torch import Tensor

from quant_gru.integer.backward import Gradients, Tape
from quant_gru.kernels.cuda.backward.inputs import Precision

MOST_BYTES = 512 << 20
"""The most memory of a backward besides its gradients; one step of a large batch may need more."""


def most_steps(N: int, C: int, H: int, precision: Precision, directions: int) -> int:
    """Return the number of steps whose backward needs at most `MOST_BYTES`, but at least one.

    Args:
        N: Rows.
        C: Features.
        H: Units.
        precision: How gradients are multiplied.
        directions: Directions that run in the same launches.
    """
    derivatives = 2 * (8 if precision.half else 16)
    states = H * (derivatives + 4 + 6 * precision.dtype.itemsize)
    codes = (C + H) * (precision.dtype.itemsize + 2)
    return max(1, MOST_BYTES // max(1, directions * N * (states + codes)))


def pieces(tape: Tape, grad_out: Tensor | None, steps: int) -> Iterator[tuple[Tape, Tensor | None]]:
    """Yield chunks of a tape in the order of its backward, of equal length except for the last.

    Args:
        tape: The inputs and outputs of the forward.
        grad_out: Gradient of the dequantized outputs (T, N, H), or None for zeros.
        steps: The most steps per chunk.
    """
    T = len(tape.out)
    size = -(-T // -(-T // steps))
    for done in range(0, T, size):
        first, last = max(0, T - done - size), T - done
        if tape.reverse:
            first, last = T - last, T - first
        before, h0 = (last, last == T) if tape.reverse else (first - 1, first == 0)
        yield (
            replace(
                tape,
                x=tape.x[first:last],
                h0=tape.h0 if h0 else tape.out[before],
                out=tape.out[first:last],
                lengths=None
                if tape.lengths is None
                else (tape.lengths - first).clamp(0, last - first),
                held=None if tape.held is None else tape.held[first:last],
                # after the first chunk, the gradient of the state includes NaN
                nan=None if done else tape.nan,
            ),
            None if grad_out is None else grad_out[first:last],
        )


class Joined:
    """Joins the gradients of a tape's chunks, which come in the order of `pieces`.

    Args:
        tape: The whole tape.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._done = 0
        self.found: Gradients | None = None

    def add(self, part: Gradients, steps: int) -> None:
        """Add the gradients of the next chunk, which has `steps` steps."""
        whole = self.found
        made: dict[str, Tensor | None] = {}
        for each in fields(Gradients):
            name, new = each.name, getattr(part, each.name)
            if new is None or name == "h0":
                made[name] = new
                continue
            old = None if whole is None else getattr(whole, name)
            made[name] = self._in_time(new, old) if name in ("x", "h") else _sum(new, old)
        self._done += steps
        self.found = Gradients(**made)  # type: ignore[arg-type]

    def _in_time(self, new: Tensor, old: Tensor | None) -> Tensor:
        T = len(self._tape.out)
        if old is None:
            old = new.new_empty((T, *new.shape[1:]))
        first = self._done if self._tape.reverse else T - self._done - len(new)
        old[first : first + len(new)] = new
        return old


def _sum(new: Tensor, old: Tensor | None) -> Tensor:
    return new if old is None else old.add_(new)
