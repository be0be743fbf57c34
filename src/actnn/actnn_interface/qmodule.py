"""QModule: a model that is trained as `config` says."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from actnn.actnn_interface.config import config
from actnn.actnn_interface.schemes import QBNScheme, QScheme, make_statistics
from actnn.adapting.adaptive import Adaptive
from actnn.adapting.layer_inputs import kernel_positions
from actnn.errors import ActNNError
from actnn.layers.compress import compress
from actnn.saving import Choice, Saving
from actnn.saving.norms import NORMS


class QModule(nn.Module):
    """A model whose saved tensors are compressed as `config` says when this is made.

    The model is changed in place and keeps its parameters: pretrained weights, dtype, device and
    hooks stay. Checkpoints are those of the model itself.

    Args:
        model: Any module.

    Attributes:
        model: The model.

    Example:
        >>> set_optimization_level("L2")
        >>> network = QModule(network)
        >>> network(images).sum().backward()
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._cache_threshold = config.empty_cache_threshold
        self.model = compress(
            model,
            bits=ceil(config.activation_compression_bits[0]),
            group=config.group_size,
            stochastic=config.stochastic,
        )
        saving = self.saving
        saving.set_choices(_choices(model))
        if config.compress_activation and config.adaptive_scheme:
            statistics = make_statistics()
            saving.adaptive = Adaptive(
                model,
                statistics,
                config.group_size,
                linear=config.adaptive_conv_scheme,
                norms=config.adaptive_bn_scheme,
            )
            _make_schemes(model, saving.adaptive)
        if torch.cuda.is_available():
            torch.backends.cudnn.benchmark = config.cudnn_benchmark_conv2d

    @property
    def saving(self) -> Saving:
        """What the model keeps for its backward."""
        saving = getattr(self.model, "actnn", None)
        if not isinstance(saving, Saving):
            raise ActNNError(
                "Expected the model of a QModule to be compressed, got one after uncompress(); "
                "make another QModule"
            )
        return saving

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the model."""
        saving = getattr(self.model, "actnn", None)
        adaptive = None if saving is None else saving.adaptive
        gradients = config.use_gradient and torch.is_grad_enabled()
        if isinstance(adaptive, Adaptive) and gradients:
            adaptive.statistics.batch = _indices(adaptive.statistics.samples)
        output = self.model(*arguments, **named)
        if self._cache_threshold is not None and torch.cuda.is_available():
            reserved = torch.cuda.memory_reserved()
            if reserved and torch.cuda.memory_allocated() < self._cache_threshold * reserved:
                torch.cuda.empty_cache()
        return output

    def train(self, mode: bool = True) -> QModule:
        """Set training mode; `config.training` follows."""
        config.training = mode
        super().train(mode)
        return self

    def state_dict(  # type: ignore[override]
        self, *arguments: Any, **named: Any
    ) -> dict[str, Any]:
        """The model's own state."""
        return self.model.state_dict(*arguments, **named)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **named: Any) -> Any:
        """Load a state of the model itself, compressed or not."""
        return self.model.load_state_dict(state_dict, *args, **named)


def _indices(samples: int) -> Tensor:
    """Return `QScheme.batch`: indices of samples of the training set.

    Raises:
        ActNNError: If there is none, or one on the host is out of range.
    """
    if QScheme.batch is None:
        raise ActNNError(
            "Expected QScheme.batch to be the indices of the samples for use_gradient, got None; "
            "actnn.DataLoader yields them"
        )
    batch = torch.as_tensor(QScheme.batch)
    if batch.device.type == "cpu" and batch.numel():
        least, most = batch.aminmax()
        if least < 0 or most >= samples:
            raise ActNNError(
                f"Expected QScheme.batch to be indices from 0 to {samples - 1} "
                f"(QScheme.num_samples is {samples}), got {int(least)} to {int(most)}"
            )
    return batch


def _choices(model: nn.Module) -> dict[str | tuple[str, int], Choice]:
    """Choices for the fields of config that are about modules."""
    if not config.compress_activation:
        return {"": Choice("offload") if config.swap else Choice("keep")}
    action: Any = "offload" if config.swap else "compress"
    choices: dict[str | tuple[str, int], Choice] = {}
    if config.swap:
        choices[""] = Choice(action, ceil(config.activation_compression_bits[0]))
    for path, module in model.named_modules():
        tag = getattr(module, "actnn_group", 0)
        if tag:
            choices[path] = Choice(action, ceil(config.activation_compression_bits[tag]))
        if isinstance(module, NORMS) and not config.enable_quantized_bn:
            choices[path] = Choice("keep")
    return choices


def _make_schemes(model: nn.Module, adaptive: Adaptive) -> None:
    """One scheme for each layer, on the statistics that training uses."""
    for path, module in model.named_modules():
        name = Adaptive.name_of(path)
        positions = kernel_positions(module)
        if positions is not None and config.adaptive_conv_scheme:
            groups = getattr(module, "groups", 1)
            QScheme(positions, 0, groups, name=name, statistics=adaptive.statistics, source=path)
        elif isinstance(module, NORMS) and config.adaptive_bn_scheme:
            QBNScheme(name=name, statistics=adaptive.statistics)
