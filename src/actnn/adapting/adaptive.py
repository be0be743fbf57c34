"""Bits that follow the sensitivity of each sample and layer of a model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from actnn import codec
from actnn.adapting.layer_inputs import Layer
from actnn.adapting.trials import capturing
from actnn.adapting.watched import Watched
from actnn.allocation import Sensitivities
from actnn.saving.active import active_step
from actnn.saving.settings import Bits

SMALLEST = 1024  # elements of a sample below which its own bits are not worth the launches


class Adaptive(Watched):
    """Allocates bits for the samples of the saved tensors of one model.

    Args:
        model: The model. Hooks on its linear and convolution layers observe gradients.
        statistics: Where they are gathered.
        group: Group of the codec.
        linear: Whether inputs of linear and convolution layers get bits of their own.
        norms: Whether all other tensors do.

    Attributes:
        samples: Samples of the batch of this step: the first dimension of the model's input.
    """

    by_sample = adapts = corrects = True

    def __init__(
        self,
        model: nn.Module,
        statistics: Sensitivities,
        group: int,
        *,
        linear: bool = True,
        norms: bool = True,
    ) -> None:
        super().__init__(statistics.average, needed=True)
        self.statistics = statistics
        self._linear, self._norms = linear, norms
        self._group = group
        self.samples = 0
        self._layers = Layer.all_of(model)
        self._count: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # record of this step -> name in the statistics
        self._sharing: dict[str, str] = {}  # name -> the first layer that shares the codes
        self._handles = [
            module.register_forward_hook(partial(_observe_output, path))
            for path, module in model.named_modules()
            if path in self._layers
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin_step(self, model: nn.Module | None) -> None:
        """Begin a forward pass of a model. A step that a CUDA graph captures learns nothing."""
        self._count.clear()
        self._names.clear()
        self.statistics.paused = capturing() or self._trials.running
        self.statistics.step()

    def begin_batch(self, samples: int) -> None:
        """Say how many samples the model's input has."""
        self.samples = samples

    def bits_of(self, path: str, tensor: Tensor, record: int, *, norm: bool = False) -> Bits | None:
        """Bits of the samples of a tensor that is about to be compressed.

        Args:
            path: Path of the module that saves it.
            tensor: Dense; its first dimension is a multiple of the samples.
            record: Index of its record.
            norm: Whether a normalization saves it.

        Returns:
            None if the tensor has no bits of its own.
        """
        samples = self.samples
        if self._at is not None:
            return Bits(tensor, self._at)
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
        self._count[path] += 1
        name = self._names[record] = self.name_of(path, self._count[path] - 1)
        source = source or self._sharing.get(name, "")
        layer = self._layers.get(source)
        factor = 0.25 if layer is None else layer.factor(self._group, elements)
        ranges = codec.group_ranges(rows, self._group)
        bits, capacity = self.statistics.bits_of(name, ranges, elements, factor, source)
        return Bits(rows, bits, capacity)

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
        return path if path in self._layers and self._count[path] == 0 else ""

    @staticmethod
    def name_of(path: str, position: int = 0) -> str:
        """The name in the statistics of a tensor that a module saves, in order of saving."""
        return f"{path}:{position}"

    def observe(self, path: str, gradient: Tensor) -> None:
        """Take in the gradient of the output of a layer."""
        self.statistics.observe_gradient(path, gradient)


def _observe_output(path: str, module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of a layer. It holds no state, so that a model can be copied with it."""
    step = active_step()
    adaptive = None if step is None else step.saving.adaptive
    if not isinstance(adaptive, Adaptive):
        return
    if isinstance(output, Tensor) and output.requires_grad and adaptive.statistics.observing:
        output.register_hook(partial(adaptive.observe, path))
