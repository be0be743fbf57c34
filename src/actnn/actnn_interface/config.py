"""The configuration that QModule reads, with the names of ActNN."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from actnn.errors import ActNNError, ActNNWarning

_UNNECESSARY = {
    "pipeline_threshold": "fit() plans the peak of each block; micro-batches are not needed",
    "simulate": "the codec gives the same codes on every device; there is nothing to simulate",
}


def _are_widths(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and bool(value) and all(1 <= each <= 8 for each in value)
    )


# Field -> what it must be. All other fields are of type bool.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "activation_compression_bits": (_are_widths, "a list of numbers from 1 to 8"),
    "refresh": (lambda value: type(value) is int and value >= 1, "an int of at least 1"),
    "initial_bits": (lambda value: type(value) is int and 1 <= value <= 8, "an int from 1 to 8"),
    "group_size": (
        lambda value: type(value) is int and value > 0 and value % 32 == 0,
        "a positive multiple of 32",
    ),
    "empty_cache_threshold": (
        lambda value: value is None or 0 <= value <= 1,
        "None or a share from 0 to 1",
    ),
    "pipeline_threshold": (lambda value: value is None or value >= 0, "None or bytes"),
}
_BOOL = (lambda value: isinstance(value, bool)), "True or False"


@dataclass
class Config:
    """What a QModule does. Set fields before the QModule is made.

    Attributes:
        compress_activation: Whether anything is compressed.
        activation_compression_bits: Average bits for each tag: a module's attribute
            `actnn_group` (0 without one) is an index into this list.
        pergroup: Ranges are those of groups; a range for a whole tensor is not offered.
        perlayer: Whether layers get different average bits.
        refresh: Steps between two allocations of these averages.
        initial_bits: Most bits of a sample.
        stochastic: Whether rounding is random.
        training: Whether the last QModule is in training mode; `train` and `eval` set it.
        group_size: Elements that share a range, a multiple of 32.
        use_gradient: Statistics for each sample of the training set; needs
            `QScheme.num_samples`, and `QScheme.batch` at every step.
        adaptive_conv_scheme: Bits per sample for convolution and linear layers.
        adaptive_bn_scheme: Bits per sample for normalizations.
        simulate: Accepted, and not needed.
        enable_quantized_bn: Whether inputs of normalizations are compressed.
        empty_cache_threshold: Free the allocator's unused blocks after a forward, if less than
            this share of its memory is in use; None for never.
        pipeline_threshold: Accepted, and not needed.
        cudnn_benchmark_conv2d: Whether cuDNN tries its kernels, which takes memory.
        swap: Whether codes move to host memory.
    """

    compress_activation: bool = True
    activation_compression_bits: list[float] = field(default_factory=lambda: [2, 8, 8])
    pergroup: bool = True
    perlayer: bool = True
    refresh: int = 100
    initial_bits: int = 8
    stochastic: bool = True
    training: bool = True
    group_size: int = 256
    use_gradient: bool = False
    adaptive_conv_scheme: bool = True
    adaptive_bn_scheme: bool = True
    simulate: bool = False
    enable_quantized_bn: bool = True
    empty_cache_threshold: float | None = None
    pipeline_threshold: int | None = None
    cudnn_benchmark_conv2d: bool = True
    swap: bool = False

    @property
    def adaptive_scheme(self) -> bool:
        """Whether layers get bits per sample; setting it sets both kinds of layers."""
        return self.adaptive_conv_scheme or self.adaptive_bn_scheme

    @adaptive_scheme.setter
    def adaptive_scheme(self, value: bool) -> None:
        self.adaptive_conv_scheme = self.adaptive_bn_scheme = value

    def __setattr__(self, name: str, value: Any) -> None:
        names = [each.name for each in fields(self)]
        if name not in (*names, "adaptive_scheme"):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            if name.startswith("debug"):
                hint = "; actnn.report(model) says what is held, and why"
            raise ActNNError(f"Expected the name of a field of config, got {name!r}{hint}")
        if name == "pergroup" and not value:
            raise ActNNError(
                "Expected pergroup to be True, got False; use a larger group_size, which loses "
                "accuracy and saves less than 0.13 bits per element"
            )
        check, rule = _RULES.get(name, _BOOL)
        try:
            valid = check(value)
        except TypeError:  # it cannot be compared with a number
            valid = False
        if not valid:
            raise ActNNError(f"Expected config.{name} to be {rule}, got {value!r}")
        if name in _UNNECESSARY and value:
            warnings.warn(
                f"config.{name} has no effect: {_UNNECESSARY[name]}", ActNNWarning, stacklevel=2
            )
        super().__setattr__(name, value)

    def reset(self) -> None:
        """Set all fields to their defaults."""
        for name, value in vars(Config()).items():
            super().__setattr__(name, value)


config = Config()
