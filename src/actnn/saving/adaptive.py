"""Bits that follow the sensitivity of each sample and layer of a model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from actnn import codec
from actnn.allocation import NoiseMonitor, Sensitivities
from actnn.saving.active import active_step
from actnn.saving.settings import Bits

SMALLEST = 1024  # elements of a sample below which its own bits are not worth the launches
SAMPLED = 1024  # groups whose ranges stand for those of a whole tensor

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class Adaptive:
    """Allocates bits for the saved tensors of one model.

    Args:
        model: The model. Hooks on its linear and convolution layers observe gradients.
        statistics: Where they are gathered.
        group: Group of the codec.
        linear: Whether inputs of linear and convolution layers get bits of their own.
        norms: Whether all other tensors do.

    Attributes:
        samples: Samples of the batch of this step: the first dimension of the model's input.
    """

    def __init__(
        self,
        model: nn.Module,
        statistics: Sensitivities,
        group: int,
        *,
        linear: bool = True,
        norms: bool = True,
    ) -> None:
        self.statistics = statistics
        self._linear, self._norms = linear, norms
        self._group = group
        self.samples = 0
        self._factors: dict[str, float] = {}
        self._count: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # record of this step -> name in the statistics
        self._sharing: dict[str, str] = {}  # name -> the first layer that shares the codes
        self._monitor = NoiseMonitor(statistics.average)
        self._handles = []
        for path, module in model.named_modules():
            positions = kernel_positions(module)
            if positions is not None:
                self._factors[path] = positions / getattr(module, "groups", 1)
                hook = partial(_observe_output, path)
                self._handles.append(module.register_forward_hook(hook))

    def detach(self) -> None:
        """Remove the hooks."""
        self._monitor.stop()
        for handle in self._handles:
            handle.remove()

    def begin_step(self, model: nn.Module | None) -> None:
        """Begin a forward pass of a model. A step that a CUDA graph captures learns nothing."""
        self._count.clear()
        self._names.clear()
        cuda, statistics = torch.cuda, self.statistics
        statistics.paused = cuda.is_available() and cuda.is_current_stream_capturing()
        if statistics.paused:
            self._monitor.stop()
            return
        noise = statistics.noise() if statistics.observing else None
        statistics.step()
        modules = () if model is None else model.modules()
        self._monitor.begin_step(modules, noise, observing=statistics.observing)

    def bits_of(self, path: str, tensor: Tensor, record: int) -> Bits | None:
        """Bits of a tensor that is about to be compressed, or of its samples.

        Args:
            path: Path of the module that saves it.
            tensor: Dense.
            record: Index of its record.

        Returns:
            None if the tensor has no bits of its own. For bits per sample it must be a batch.
        """
        if not tensor.numel():
            return None
        if self.statistics.per_sample:
            return self._bits_of_samples(path, tensor, record)
        source = self._source(path)
        if not (self._linear if source else self._norms):
            return None
        name = self._next_name(path, record)
        source = source or self._sharing.get(name, "")
        if self.statistics.observing:
            ranges = _sampled_ranges(tensor.detach(), self._group)
            factor = self._factor(source, tensor, tensor.numel())
            self.statistics.observe_tensor(name, ranges, tensor.numel(), factor, source)
        return Bits(tensor, self.statistics.tensor_bits(name))

    def share(self, record: int, path: str) -> None:
        """Say that a module saves a tensor whose codes are held already.

        If it is the input of a layer, its gradients tell the sensitivity from the next step on.

        Args:
            record: Index of the record with the codes.
            path: Path of the module.
        """
        name = self._names.get(record)
        if name is not None and self._source(path):
            self._count[path] += 1
            self._sharing.setdefault(name, path)

    def _source(self, path: str) -> str:
        """The layer whose gradients tell the sensitivity of the next tensor that it saves."""
        return path if path in self._factors and self._count[path] == 0 else ""

    def _next_name(self, path: str, record: int) -> str:
        self._count[path] += 1
        name = self._names[record] = self.name_of(path, self._count[path] - 1)
        return name

    def _factor(self, source: str, tensor: Tensor, elements: int) -> float:
        """Return group K / (4 I g), with the positions I that so many elements of a tensor have."""
        channels = tensor.shape[1 if tensor.ndim > 2 else -1] if tensor.ndim else 1
        positions = elements / channels
        return self._group * self._factors.get(source, 1.0) / (4 * positions)

    def _bits_of_samples(self, path: str, tensor: Tensor, record: int) -> Bits | None:
        samples = self.samples
        if not samples or tensor.numel() < SMALLEST * samples or tensor.shape[0] % samples:
            return None
        rows = tensor.detach()
        if tensor.shape[0] != samples:
            if not tensor.is_contiguous():
                return None
            rows = rows.view(samples, -1)
        elements = tensor.numel() // samples
        if rows.stride(0) != elements:
            return None  # samples are interleaved in memory
        source = self._source(path)
        if not (self._linear if source else self._norms):
            return None
        name = self._next_name(path, record)
        source = source or self._sharing.get(name, "")
        factor = self._factor(source, tensor, elements)
        ranges = codec.group_ranges(rows, self._group)
        bits, capacity = self.statistics.bits_of(name, ranges, elements, factor, source)
        return Bits(rows, bits, capacity)

    @staticmethod
    def name_of(path: str, position: int = 0) -> str:
        """The name in the statistics of a tensor that a module saves, in order of saving."""
        return f"{path}:{position}"

    def observe(self, path: str, gradient: Tensor) -> None:
        """Take in the gradient of the output of a layer."""
        self.statistics.observe_gradient(path, gradient)


def _sampled_ranges(tensor: Tensor, group: int) -> Tensor:
    """Sum of the squared ranges of all groups of a dense tensor, from some of them, float32 ()."""
    elements = tensor.numel()
    flat = tensor.as_strided((elements,), (1,))
    count = elements // group
    if count:
        flat = flat[: count * group].view(count, group)[:: -(-count // SAMPLED)]
    low, high = flat.aminmax(dim=-1)
    return (high.float() - low.float()).square().mean() * (elements / group)


def kernel_positions(module: nn.Module) -> int | None:
    """Kernel positions of a linear or convolution layer; None for other modules."""
    if isinstance(module, nn.Linear):
        return 1
    if isinstance(module, _CONVOLUTIONS):
        return torch.Size(module.kernel_size).numel()
    return None


def _observe_output(path: str, module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a layer. It holds no state, so that a model can be copied with it."""
    step = active_step()
    adaptive = None if step is None else step.saving.adaptive
    if adaptive is None or not isinstance(output, Tensor) or not output.requires_grad:
        return
    if adaptive.statistics.observing:
        output.register_hook(partial(adaptive.observe, path))
