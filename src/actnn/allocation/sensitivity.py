"""How much each saved tensor's error disturbs the gradient, learned while training.

The weight gradient of a linear or convolution layer is a sum over samples n of products of the
output's gradient and the input. If the input of sample n is kept at b bits, the variance of this
gradient is at most C_n / (2^b - 1)^2, with

    C_n = factor x range2_n x energy_n

range2_n is the sum of squared ranges of the groups of sample n, energy_n the squared norm of the
output's gradient (of this sample, or that of the batch over its samples), and
factor = group K / (4 I g): K kernel positions, I positions of the input, g groups of the
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from actnn.allocation.host_copy import HostCopy
from actnn.allocation.threshold import MAX_BITS, MIN_BITS, allocate
from actnn.errors import ActNNError

EARLY = 10  # steps in which statistics of samples change fast
AROUND = 3  # steps before and after a refresh in which gradients are observed


@dataclass
class TensorStatistics:
    """One saved tensor.

    Attributes:
        bits: Average bits, on the host.
        variance: C of each sample in the last forward, (N,); None without gradient statistics.
        elements: Elements of one sample.
        followers: Elements of the tensors that take over its bits, counted likewise.
    """

    bits: float
    variance: Tensor | None = None
    elements: int = 0
    followers: dict[str, int] = field(default_factory=dict)


@dataclass
class Sensitivities:
    """Bits per sample under one average, from smoothed statistics.

    A step begins with `step`; its forward calls `bits_of`, its backward `observe_gradient`. Nothing
    waits for the device: a new allocation across layers is used as soon as its copy has arrived on
    the host.

    Attributes:
        average: Average bits of all elements, 1 to 8.
        most: Most bits of a sample or tensor.
        refresh: Steps between two allocations across layers.
        decay: Weight of the past in smoothed gradients.
        per_layer: Whether layers get different averages.
        samples: Samples of the training set, for gradient statistics of each of them; 0 for means
            over the batch.
        batch: Indices in the training set of the samples of this step, (N,).
        paused: Whether steps neither observe nor allocate; bits stay as they are.
    """

    average: float
    most: int = MAX_BITS
    refresh: int = 20
    decay: float = 0.9
    per_layer: bool = True
    samples: int = 0
    batch: Tensor | None = None
    paused: bool = False
    steps: int = 0
    tensors: dict[str, TensorStatistics] = field(default_factory=dict)
    _energy: dict[str, Tensor] = field(default_factory=dict)
    _leader: TensorStatistics | None = None
    _pending: tuple[list[str], HostCopy] | None = None

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.average <= self.most <= MAX_BITS:
            raise ActNNError(
                f"Expected average bits to be from 1 to {self.most}, and most bits to be at most "
                f"8, got an average of {self.average}"
            )
        if self.refresh < 1:
            raise ActNNError(f"Expected refresh to be at least 1 step, got {self.refresh}")
        if self.samples < 0:
            raise ActNNError(f"Expected samples to be at least 0, got {self.samples}")

    @property
    def observing(self) -> bool:
        """Whether gradients of this step are needed: early, and at or around each refresh."""
        if self.paused:
            return False
        phase = self.steps % self.refresh
        near = phase < AROUND or phase >= self.refresh - AROUND
        return self.samples > 0 or self.steps <= EARLY or near

    def layer_bits(self, name: str) -> float:
        """Average bits of a tensor, on the host."""
        return self.tensors[name].bits if name in self.tensors else self.average

    def observe_gradient(self, source: str, gradient: Tensor) -> None:
        """Take in the gradient of a layer's output.

        Args:
            source: Name of the layer.
            gradient: (N, ...).
        """
        if not gradient.numel():
            return
        gradient = gradient.detach()
        known = self._energy.get(source)
        if self.samples:
            others = tuple(range(1, gradient.ndim))
            norms = _norm(gradient, others).square()
            self._energy[source] = self._with_batch(known, norms)
            return
        total = _norm(gradient).square()
        self._energy[source] = total if known is None else torch.lerp(total, known, self.decay)

    def bits_of(
        self, name: str, ranges: Tensor, elements: int, factor: float = 0.25, source: str = ""
    ) -> tuple[Tensor, int]:
        """Bits of each sample of a tensor that is about to be compressed.

        Args:
            name: Key of the tensor, the same every step.
            ranges: Sum of squared group ranges of each sample, (N,).
            elements: Elements of one sample.
            factor: group K / (4 I g) of the layer.
            source: Name of the layer whose gradients are observed. A tensor without one takes
                over the average of the last tensor before it that has one.

        Returns:
            Bits, int32 (N,), on the device; and the most that they can sum to, on the host.
        """
        count = ranges.numel()
        known = self.tensors.setdefault(name, TensorStatistics(self.average))
        known.elements = elements
        spread = ranges.detach().double()
        energy = self._energy.get(source) if source else None
        if energy is not None:
            spread = spread * factor * self._of_batch(energy, count)
            known.variance = spread
            self._leader = known
        elif not source and self._leader is not None:
            known.bits = self._leader.bits
            self._leader.followers[name] = elements
        if source and energy is None:
            spread = torch.zeros_like(spread)
        capacity = int(known.bits * count)
        bits = allocate(spread, torch.ones_like(spread), capacity / count, self.most)
        return bits, capacity

    def step(self) -> None:
        """Begin a training step, and allocate across layers when it is time."""
        self._leader = None
        if self.paused:
            return
        self.steps += 1
        if not self.per_layer:
            return
        due = self.steps % self.refresh == 0 or self.steps in (3, EARLY)
        if self._pending is None and due:
            self._start_allocation()
        if self._pending is not None and self._pending[1].ready:
            self._finish_allocation()

    def allocate_layers(self) -> None:
        """Allocate across layers now, and wait for it."""
        self._start_allocation()
        self._finish_allocation()

    def _with_batch(self, table: Tensor | None, norms: Tensor) -> Tensor:
        """The squared norms of all samples after those of a batch, (samples,); NaN if unseen."""
        if self.batch is None or self.batch.numel() != len(norms):
            got = "None" if self.batch is None else self.batch.numel()
            raise ActNNError(
                f"Expected batch to have the index of each of {len(norms)} samples, got {got}; "
                "set it before every step"
            )
        if table is None:
            table = torch.full((self.samples,), torch.nan, device=norms.device)
        index = self.batch.to(norms.device, non_blocking=True)
        old = table[index]
        table[index] = torch.where(old.isnan(), norms, (old + norms) / 2)
        return table

    def _of_batch(self, energy: Tensor, count: int) -> Tensor:
        """The energy of each sample of the batch; samples that were never seen get the mean."""
        if energy.ndim == 0:
            return energy / count
        if self.batch is None or self.batch.numel() != count:
            return energy.nanmean()
        now = energy[self.batch.to(energy.device, non_blocking=True)]
        return torch.where(now.isnan(), energy.nanmean(), now)

    def _finish_allocation(self) -> None:
        if self._pending is not None:
            names, copy = self._pending
            for name, bits in zip(names, copy.value.tolist(), strict=True):
                self.tensors[name].bits = bits
            self._pending = None

    def _start_allocation(self) -> None:
        """One allocation for all samples of all layers; a layer's bits are the mean of its own."""
        layers = [
            (name, known.variance, float(known.elements + sum(known.followers.values())))
            for name, known in self.tensors.items()
            if known.variance is not None
        ]
        if not layers:
            return
        home = layers[0][1].device  # layers may be on several devices
        c = torch.cat([variance.to(home) for _, variance, _ in layers])
        w = torch.cat([torch.full_like(v, weight, device=home) for _, v, weight in layers])
        bits = allocate(c, w, self.average, self.most).double()
        means = [part.mean() for part in bits.split([len(v) for _, v, _ in layers])]
        self._pending = ([name for name, _, _ in layers], HostCopy(torch.stack(means)))


def _norm(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Euclidean norm over dimensions, float32. Half precision is summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=dims, dtype=wide)
    return norm.float()
