"""Optimization levels as settings of `config`."""

from __future__ import annotations

from typing import Any

from actnn.actnn_interface.config import config
from actnn.layers.levels import level_of

_FIXED = {"adaptive_conv_scheme": False, "adaptive_bn_scheme": False}


def set_optimization_level(level: str) -> None:
    """Set all fields of `config` for a level; later levels inherit nothing from earlier ones.

    L0 compresses nothing. L1 uses 4 bits and leaves normalizations alone, L2 uses 4 bits for them
    as well. L3 uses 2 bits on average, moved to the samples and layers that need them. L3.1 saves
    the workspaces of cuDNN and unused blocks of the allocator, too. L4 moves the codes to host
    memory; L5 is L4, for an allocator whose segments can grow. 'swap' moves exact tensors.

    Args:
        level: A name of `actnn.compress`: 'L0' to 'L5', a sub-level such as 'L3.1', or 'swap'.

    Raises:
        ActNNError: If there is no such level.

    Example:
        >>> set_optimization_level("L3")
        >>> config.activation_compression_bits
        [2, 8, 8]
    """
    chosen = level_of(level)
    fields: dict[str, Any] = {
        "compress_activation": chosen.compress,
        "enable_quantized_bn": chosen.norms,
        "swap": chosen.swap,
    }
    if chosen.compress:
        fields["activation_compression_bits"] = [chosen.bits, 8, 8]
    if not chosen.adaptive:
        fields.update(_FIXED)
    if level == "L3.1":
        fields.update(cudnn_benchmark_conv2d=False, empty_cache_threshold=0.2)
    config.reset()
    for name, value in fields.items():
        setattr(config, name, value)
