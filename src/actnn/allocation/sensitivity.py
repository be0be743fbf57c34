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

from actnn._errors import ActNNError
from actnn.allocation.host_copy import HostCopy
from actnn.allocation.threshold import MAX_BITS, MIN_BITS, allocate

FIRST = (1, 4)  # steps after which bits of tensors are allocated early
EARLY = 10  # steps in which statistics of samples change fast
AROUND = 3  # steps before and after a refresh in which gradients are observed


@dataclass
class TensorStatistics:
    """One saved tensor.

    Attributes:
        bits: Average bits, on the host.
        variance: C of each sample in the last forward, (N,), or of the whole tensor, (1,); None
            without gradient statistics.
        elements: Elements of one sample, or of the whole tensor.
        followers: Elements of the tensors that take over its bits, counted likewise.
        source: Name of the layer whose gradients are observed, '' if there is none.
        spread: factor x range2 of the whole tensor, (); None if samples have bits of their own.
    """

    bits: float
    variance: Tensor | None = None
    elements: int = 0
    source: str = ""
    spread: Tensor | None = None
    followers: dict[str, int] = field(default_factory=dict)


@dataclass
class Sensitivities:
    """Bits per tensor, or per sample, under one average, from smoothed statistics.

    A step begins with `step`; its forward calls `tensor_bits` (or `bits_of` for bits per sample),
    its backward `observe_gradient`. Nothing waits for the device: a new allocation across layers
    is used as soon as its copy has arrived on the host.

    With bits per tensor, ranges and gradients are observed in steps where `observing` is true, and
    bits are integers. All other steps read them on the host, and run nothing on the device.

    Attributes:
        average: Average bits of all elements, 1 to 8.
        most: Most bits of a sample or tensor.
        refresh: Steps between two allocations across layers.
        decay: Weight of the past in smoothed gradients.
        per_layer: Whether layers get different averages.
        per_sample: Whether samples of a tensor get different bits, anew in every step.
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
    per_sample: bool = True
    samples: int = 0
    batch: Tensor | None = None
    paused: bool = False
    steps: int = 0
    tensors: dict[str, TensorStatistics] = field(default_factory=dict)
    _energy: dict[str, Tensor] = field(default_factory=dict)
    _latest: dict[str, Tensor] = field(default_factory=dict)  # of the last observed step
    _leader: TensorStatistics | None = None
    _pending: tuple[dict[str, list[str]], HostCopy] | None = None  # layer -> followers

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
        if self.samples and not self.per_sample:
            raise ActNNError(
                "Expected per_sample to be True for statistics of each sample of the training "
                f"set, got False with samples={self.samples}"
            )

    @property
    def observing(self) -> bool:
        """Whether gradients of this step are needed: early, and at or around each refresh."""
        if self.paused:
            return False
        if not self.per_sample:
            return self._observes(self.steps)
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
        self._latest[source] = total
        self._energy[source] = total if known is None else torch.lerp(total, known, self.decay)

    def tensor_bits(self, name: str) -> int:
        """Bits of a tensor whose samples have equal bits, on the host.

        Args:
            name: Key of the tensor, the same every step.
        """
        return int(self.layer_bits(name))

    def observe_tensor(
        self, name: str, ranges: Tensor, elements: int, factor: float = 0.25, source: str = ""
    ) -> None:
        """Take in the ranges of a tensor whose samples have equal bits.

        Args:
            name: Key of the tensor, the same every step.
            ranges: Sum of the squared ranges of all its groups, ().
            elements: Its elements.
            factor: group K / (4 I g) of the layer, with the positions of the whole batch as I.
            source: As for `bits_of`.
        """
        known = self.tensors.setdefault(name, TensorStatistics(self.average))
        known.elements, known.source = elements, source
        if source:
            known.spread = ranges.double() * factor
            self._leader = known
        elif self._leader is not None:
            self._leader.followers[name] = elements

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
        if not self.per_sample or (source and energy is None):
            spread = torch.zeros_like(spread)
        capacity = int(known.bits * count)
        bits = allocate(spread, torch.ones_like(spread), capacity / count, self.most)
        return bits, capacity

    def step(self) -> None:
        """Begin a training step, and allocate across layers when it is time."""
        if self.paused:
            return
        self.steps += 1
        self._leader = None
        if not self.per_layer:
            return
        if self.per_sample:
            due = self.steps % self.refresh == 0 or self.steps in (3, EARLY)
        else:
            due = self._observes(self.steps - 1)
        if self._pending is None and due:
            self._start_allocation()
        if self._pending is not None and self._pending[1].ready:
            self._finish_allocation()
        if not self.per_sample and self.observing:
            for known in self.tensors.values():  # What this step does not save takes no part.
                known.spread = None
                known.followers.clear()

    def allocate_layers(self) -> None:
        """Allocate across layers now, and wait for it."""
        self._start_allocation()
        self._finish_allocation()

    def noise(self) -> Tensor | None:
        """Upper bound of the variance that compression added to the gradient of the last step, ().

        Its energies are those of that step alone. None if they were not observed.
        """
        parts = []
        for known in self.tensors.values():
            latest, smooth = self._latest.get(known.source), self._energy.get(known.source)
            variance = known.variance
            if known.spread is not None:
                variance = None if latest is None else known.spread * latest
            elif variance is not None and latest is not None and smooth is not None:
                variance = variance * (latest / smooth)
            if variance is not None:
                parts.append(variance.sum() / (2.0**known.bits - 1) ** 2)
        return torch.stack(parts).sum() if parts else None

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
            layers, copy = self._pending
            if not self.per_sample:
                for known in self.tensors.values():
                    known.bits = self.average  # of those that took no part
            for (name, followers), bits in zip(layers.items(), copy.value.tolist(), strict=True):
                self.tensors[name].bits = bits
                if not self.per_sample:
                    for follower in followers:
                        self.tensors[follower].bits = bits
            self._pending = None

    def _observes(self, step: int) -> bool:
        """Whether bits per tensor are allocated from the statistics of a step."""
        return step in FIRST or (step > 0 and step % self.refresh == 0)

    def _combine(self) -> None:
        """Sensitivities of whole tensors, from their ranges and the gradients of their layers."""
        for known in self.tensors.values():
            energy = self._energy.get(known.source)
            known.variance = None
            if known.spread is not None and energy is not None:
                known.variance = (known.spread * energy).view(1)

    def _start_allocation(self) -> None:
        """One allocation for all samples of all layers; a layer's bits are the mean of its own."""
        if not self.per_sample:
            self._combine()
        layers = [
            (name, known.variance, float(known.elements + sum(known.followers.values())))
            for name, known in self.tensors.items()
            if known.variance is not None
        ]
        if not layers:
            return
        c = torch.cat([variance for _, variance, _ in layers])
        w = torch.cat([torch.full_like(variance, weight) for _, variance, weight in layers])
        bits = allocate(c, w, self.average, self.most).double()
        means = [part.mean() for part in bits.split([len(v) for _, v, _ in layers])]
        followers = {name: list(self.tensors[name].followers) for name, _, _ in layers}
        self._pending = (followers, HostCopy(torch.stack(means)))


def _norm(x: Tensor, dims: tuple[int, ...] | None = None) -> Tensor:
    """Euclidean norm over dimensions, float32. Half precision is summed in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=dims, dtype=wide)
    return norm.float()
