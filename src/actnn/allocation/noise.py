"""Comparison of the noise that compression adds with the noise of the gradient itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from actnn._errors import ActNNWarning
from actnn.allocation.host_copy import HostCopy

SAMPLED = 4096  # elements of each parameter that estimate the variance of its gradient
WARM_UP = 8  # observations before the estimate counts


class NoiseMonitor:
    """Warns once if compression adds more than a tenth of the gradient's own variance.

    The gradient's variance over steps comes from moving averages of some elements of each
    parameter. Nothing waits for the device: a warning comes some steps late.

    Args:
        parameters: Parameters of the model.
        share: The share of the variance above which it warns.
        decay: Weight of the past in the moving averages.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, share: float = 0.1, decay: float = 0.9
    ) -> None:
        self.share, self.decay = share, decay
        self.warned = False
        self._parameters = [p for p in parameters if p.requires_grad]
        self._mean: Tensor | None = None
        self._square: Tensor | None = None
        self._count = 0
        self._pending: HostCopy | None = None

    @torch.no_grad()
    def observe(self, noise: Tensor | None) -> None:
        """After a backward: add its gradients, and compare with the noise of compression, ()."""
        if self.warned:
            return
        if self._pending is not None and self._pending.ready:
            added, own = self._pending.value.tolist()
            self._pending = None
            if added > self.share * own:
                self.warned = True
                warnings.warn(
                    f"Compression adds up to {added / max(own, 1e-300):.0%} of the gradient's "
                    f"variance. Expected it to be at most {self.share:.0%}; use more bits",
                    ActNNWarning,
                    stacklevel=2,
                )
        variance = self._variance()
        ready = self._count >= WARM_UP and self._pending is None
        if noise is not None and variance is not None and ready:
            self._pending = HostCopy(torch.stack([noise.double(), variance.double()]))

    def _variance(self) -> Tensor | None:
        """Variance of the whole gradient over the steps so far."""
        some, scales = [], []
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                gradient = parameter.grad.detach()
                if gradient.is_complex():
                    gradient = torch.view_as_real(gradient)
                flat = gradient.flatten()
                taken = flat[:: -(-flat.numel() // SAMPLED)].float()
                # Scaled, so that the sum of squares stands for all elements.
                some.append(taken)
                scales.append((flat.numel() / taken.numel()) ** 0.5)
        if not some:
            return None
        now = torch.cat(torch._foreach_mul(some, scales))
        if self._mean is None or self._square is None or self._mean.shape != now.shape:
            self._mean, self._square, self._count = now, now.square(), 1
            return None
        self._mean = torch.lerp(now, self._mean, self.decay)
        self._square = torch.lerp(now.square(), self._square, self.decay)
        self._count += 1
        return (self._square - self._mean.square()).sum()
