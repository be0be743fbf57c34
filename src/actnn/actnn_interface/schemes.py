"""Schemes: the bits of a layer, in the notes' names, on the statistics of `Sensitivities`."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from actnn.actnn_interface.config import config
from actnn.allocation import Sensitivities
from actnn.codec import group_ranges
from actnn.errors import ActNNError


class QScheme:
    """Bits of the input of one convolution or linear layer.

    Args:
        num_locations: Kernel positions: k of a 1d, k^2 of a 2d convolution; 1 of a linear layer.
        group: Tag: index into `config.activation_compression_bits`.
        depthwise_groups: Groups of the convolution.
        name: Key of the layer's input in the statistics.
        statistics: Statistics that schemes share; None for `QScheme.statistics`.
        source: Key of the layer's gradients in the statistics; None for `name`.

    Attributes:
        layers: All schemes.
        num_layers: Their number.
        num_samples: Samples of the training set, for `config.use_gradient`.
        prev_layer: The scheme that was used last: a normalization takes over its bits.
        batch: Indices in the training set of the samples of this step, (N,).
    """

    layers: ClassVar[list[QScheme]] = []
    num_layers: ClassVar[int] = 0
    num_samples: ClassVar[int] = 1
    prev_layer: ClassVar[QScheme | None] = None
    batch: ClassVar[Tensor | None] = None
    statistics: ClassVar[Sensitivities | None] = None

    def __init__(
        self,
        num_locations: int = 1,
        group: int = 0,
        depthwise_groups: int = 1,
        *,
        name: str | None = None,
        statistics: Sensitivities | None = None,
        source: str | None = None,
    ) -> None:
        if not 0 <= group < len(config.activation_compression_bits):
            raise ActNNError(
                f"Expected group to be an index of config.activation_compression_bits "
                f"({len(config.activation_compression_bits)} entries), got {group}"
            )
        if statistics is None:
            statistics = QScheme.statistics or make_statistics(group)
            QScheme.statistics = statistics
        self._statistics = statistics
        self.name = f"scheme {QScheme.num_layers}" if name is None else name
        self._source = self.name if source is None else source
        self.group, self.num_locations = group, num_locations
        self.depthwise_groups = depthwise_groups
        QScheme.layers.append(self)
        QScheme.num_layers += 1

    @property
    def C(self) -> Tensor | None:
        """Sensitivity of each sample in the last forward, (N,); None before there is one."""
        known = self._statistics.tensors.get(self.name)
        return None if known is None else known.variance

    @property
    def bits(self) -> float:
        """Average bits of the layer: the mean over its samples of the allocation of all layers."""
        return self._statistics.layer_bits(self.name)

    def compute_quantization_bits(self, input: Tensor) -> Tensor:
        """Bits of each sample of an input, from its ranges and the gradient statistics.

        Args:
            input: (N, ...).

        Returns:
            int32 (N,), on the device of the input; their sum is at most floor(bits N).
        """
        self._statistics.batch = QScheme.batch
        elements = input[0].numel()
        positions = input[0][0].numel() if input.ndim > 2 else 1
        factor = config.group_size * self.num_locations / (4 * positions * self.depthwise_groups)
        ranges = group_ranges(input, config.group_size)
        source = "" if isinstance(self, QBNScheme) else self._source
        bits, _ = self._statistics.bits_of(self.name, ranges, elements, factor, source)
        QScheme.prev_layer = self
        return bits

    def set_scale(self, grad: Tensor) -> None:
        """Take in the gradient of the layer's output, (N, ...): its squared norm is smoothed."""
        self._statistics.batch = QScheme.batch
        self._statistics.observe_gradient(self._source, grad)

    @staticmethod
    def allocate_perlayer() -> None:
        """Allocate bits across all layers, and give each layer the mean of its samples."""
        for statistics in {id(s._statistics): s._statistics for s in QScheme.layers}.values():
            statistics.allocate_layers()

    def if_allocate_perlayer(self) -> None:
        """Allocate across layers if this is the first layer, whose backward is the last."""
        first = next((each for each in QScheme.layers if not isinstance(each, QBNScheme)), None)
        if self is first and config.perlayer:
            QScheme.allocate_perlayer()

    @staticmethod
    def reset() -> None:
        """Forget all schemes and statistics."""
        QScheme.layers.clear()
        QScheme.num_layers, QScheme.num_samples = 0, 1
        QScheme.prev_layer = QScheme.batch = QScheme.statistics = None


class QBNScheme(QScheme):
    """Bits of the input of one normalization: those of the convolution before it."""

    def set_scale(self, grad: Tensor) -> None:
        """Do nothing: a normalization's bits follow ranges, and the layer before it."""


def make_statistics(group: int = 0) -> Sensitivities:
    """Statistics with the settings of `config` for one tag."""
    if config.use_gradient and QScheme.num_samples <= 1:
        raise ActNNError(
            "Expected QScheme.num_samples to be the size of the training set for use_gradient, "
            f"got {QScheme.num_samples}"
        )
    return Sensitivities(
        average=config.activation_compression_bits[group],
        most=config.initial_bits,
        per_layer=config.perlayer,
        refresh=config.refresh,
        samples=QScheme.num_samples if config.use_gradient else 0,
        batch=None if QScheme.batch is None else torch.as_tensor(QScheme.batch),
    )
