"""Equal bits whose noise is compared with that of the gradient itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from actnn.adapting.replay import Gradient, Replay
from actnn.adapting.trials import FEW, Trial, Trials, worst_of
from actnn.allocation.threshold import MAX_BITS
from actnn.saving.context import Saving
from actnn.saving.settings import Bits
from actnn.saving.uncompiled import uncompiled


class Watched:
    """Allocates nothing; warns once if the bits add too much noise.

    Args:
        bits: Of all tensors, or on average.
        needed: See `Trials`.
    """

    by_sample = adapts = corrects = False

    def __init__(self, bits: float, *, needed: bool = False) -> None:
        self._trials = Trials(bits, needed=needed, batches=1 if bits > FEW else 2)
        self._bits = bits
        self._at: int | None = None  # bits of all tensors, in a trial

    @property
    def floor(self) -> int:
        """The fewest bits of tensors that have no bits of their own."""
        return self._at or 1

    @property
    def runs(self) -> int:
        """How many steps comparisons of gradients have run so far."""
        return self._trials.runs

    def begin_step(self, model: nn.Module | None) -> None:
        """Do nothing."""

    def begin_batch(self, samples: int) -> None:
        """Do nothing."""

    def bits_of(self, path: str, tensor: Tensor, record: int, *, norm: bool = False) -> Bits | None:
        """Return None: no tensor has bits of its own."""
        return None

    def bits_of_derivative(self, path: str, elements: int) -> int | None:
        """Bits of the codes of a derivative: in a trial those of all tensors, else None."""
        return self._at

    def record_of(self, name: str) -> int | None:
        """Return None: no tensor has a name of its own."""
        return None

    def share(self, record: int, path: str) -> None:
        """Do nothing."""

    def detach(self) -> None:
        """Do nothing."""

    @uncompiled
    def watch(
        self, saving: Saving, forward: Callable[..., Any], arguments: Any, named: Any
    ) -> Replay | None:
        """Begin a forward of the model. See `Trials.watch`."""
        return self._trials.watch(saving, forward, arguments, named, self._judge)

    def _best(self, trial: Trial, batch: int = 0) -> Gradient:
        """Return the gradient at 8 bits."""
        self._at = MAX_BITS
        try:
            return trial.gradient(batch)
        finally:
            self._at = None

    def _judge(self, trial: Trial) -> bool:
        """Warn of too much noise, and of codes that are wrong."""
        self._trials.compare(trial, math.floor(self._bits), self._best)
        if self._bits > FEW:
            trial.saving.adaptive = None  # that was all
            return True
        exact, other = self._best(trial), self._best(trial, 1)
        if not exact.is_finite or exact.energy() == 0:
            return False
        self._trials.judge_noise(
            trial, exact, other, trial.gradient(0), lambda: worst_of(trial, math.floor(self._bits))
        )
        return True
