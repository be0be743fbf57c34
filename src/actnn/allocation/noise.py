"""Comparison of the noise that compression adds with the noise of the gradient itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actnn._errors import ActNNWarning
from actnn.allocation.host_copy import HostCopy
from actnn.allocation.threshold import MAX_BITS

SAMPLED = 4096  # elements of each parameter that estimate the variance of its gradient
SKIPPED = 2  # pairs of steps at the beginning, before bits are allocated
WARM_UP = 3  # pairs after these, before the estimate counts


class NoiseMonitor:
    """Warns once if compression adds more than a tenth of the gradient's variance over batches.

    Half of the squared difference between the gradients of two steps in succession is their
    variance over batches, and the noise of compression: the model has hardly changed between them.
    Gradients are taken before they are accumulated, scaled or averaged over processes, so that each
    process compares its own. Nothing waits for the device: a warning comes some steps late.

    Args:
        average: Average bits, for advice.
        share: The share of the variance above which it warns.
        decay: Weight of the past in the moving average.
    """

    def __init__(self, average: float, *, share: float = 0.1, decay: float = 0.8) -> None:
        self.share, self.decay, self.average = share, decay, average
        self.warned = False
        self._handles: dict[int, Any] = {}  # of hooks, by the parameter or the module
        self._gradients: list[dict[int, Tensor]] = []  # of the steps of a pair, by parameter
        self._noise: Tensor | None = None
        self._added: Tensor | None = None  # noise as a share of half of the difference, smoothed
        self._pairs = 0
        self._pending: HostCopy | None = None

    def begin_step(
        self, modules: Iterable[nn.Module], noise: Tensor | None, *, observing: bool
    ) -> None:
        """Begin a step.

        Args:
            modules: Those of the model.
            noise: Variance that compression has added to the gradient of the last step, ().
            observing: Whether the noise of this step will be known.
        """
        if self.warned:
            return
        if self._pending is not None and self._pending.ready:
            added, self._pending = float(self._pending.value), None
            if added > self.share * (1 - added):
                self._warn(added / max(1 - added, 0.01))
        if len(self._gradients) == 1:
            self._noise = noise
        if len(self._gradients) == 2:
            self._finish_pair()
        if len(self._gradients) == 1 or (observing and not self.warned):
            self._gradients.append({})
        if self._gradients and not self._handles:
            for module in modules:
                self._watch(module)

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._gradients = {}, []

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies share; hooks and the pair of steps that is running stay here."""
        return self.__dict__ | {"_handles": {}, "_gradients": [], "_noise": None, "_pending": None}

    def _watch(self, module: nn.Module, _: object = None) -> None:
        """Hook a module's parameters. `fully_shard` puts whole ones there before each forward."""
        if torch.compiler.is_compiling() or not self._gradients:
            return
        for parameter in module._parameters.values():
            if parameter is None or not parameter.requires_grad or id(parameter) in self._handles:
                continue
            hook = partial(self._take, id(parameter))
            self._handles[id(parameter)] = parameter.register_hook(hook)
            if type(parameter) is not nn.Parameter and id(module) not in self._handles:
                self._handles[id(module)] = module.register_forward_pre_hook(self._watch)

    @torch.no_grad()
    def _take(self, index: int, gradient: Tensor) -> None:
        """Hook of a parameter: add some elements of its gradient."""
        if not self._gradients or type(gradient) is not Tensor or gradient.layout != torch.strided:
            return
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        flat, found = gradient.flatten(), self._gradients[-1]
        taken = flat[:: max(1, -(-flat.numel() // SAMPLED))].to(torch.float32, copy=True)
        # Scaled, so that the sum of squares stands for all elements.
        taken *= math.sqrt(flat.numel() / max(1, taken.numel()))
        found[index] = found[index] + taken if index in found else taken

    @torch.no_grad()
    def _finish_pair(self) -> None:
        first, second = self._gradients
        self.stop()
        parts = [first[i] - second[i] for i in first if i in second]
        if not parts or self._noise is None:
            return
        self._pairs += 1
        if self._pairs <= SKIPPED:
            return
        difference = torch.cat(parts).square().sum() / 2
        now = (self._noise / difference).clamp(max=1)
        if self._added is None:
            self._added = torch.zeros_like(now)
        # A step whose gradient has overflowed does not count.
        past = 1 - 1 / (self._pairs - SKIPPED)
        mean = torch.lerp(now, self._added, min(past, self.decay))
        self._added = torch.where(now.isfinite(), mean, self._added)
        if self._pairs >= SKIPPED + WARM_UP and self._pending is None:
            self._pending = HostCopy(self._added)

    def _warn(self, ratio: float) -> None:
        """Warn that compression adds so much of the gradient's own variance."""
        self.warned = True
        self.stop()
        codes = 2.0**self.average - 1
        better = [
            (bits, ratio * (codes / (2.0**bits - 1)) ** 2)
            for bits in range(int(self.average) + 1, MAX_BITS + 1)
        ]
        advice = next((each for each in better if each[1] <= self.share), None)
        warnings.warn(
            f"Compression adds {ratio:.0%} of the variance that the gradient has over batches, as "
            f"if a batch had {ratio / (1 + ratio):.0%} fewer samples. Expected at most "
            f"{self.share:.0%}"
            + (f"; {advice[0]} bits would add {advice[1]:.1%}" if advice else ""),
            ActNNWarning,
            stacklevel=2,
        )
