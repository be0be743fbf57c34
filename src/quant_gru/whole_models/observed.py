"""A model whose GRUs are observed in float mode, or tried with other scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quant_gru.calibration.batches import eval_mode
from quant_gru.modules.gru import QuantGRU

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""A forward pre-hook of a GRU: hook(gru, args, kwargs)."""


@contextmanager
def observed_in_float(
    model: torch.nn.Module, grus: Mapping[str, QuantGRU], hooks: Mapping[str, Hook]
) -> Iterator[None]:
    """Put a model into eval and float mode without gradients, and restore it, also after errors.

    Args:
        model: A model.
        grus: Name -> a GRU of it.
        hooks: Name -> what is called with the arguments of each call of that GRU.
    """
    quantized = [(gru, gru.use_quantization) for gru in grus.values()]
    handles = [
        gru.register_forward_pre_hook(hooks[name], with_kwargs=True) for name, gru in grus.items()
    ]
    try:
        for gru in grus.values():
            gru.use_quantization = False
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for gru, on in quantized:
            gru.use_quantization = on


@contextmanager
def scales_kept(grus: Mapping[str, QuantGRU]) -> Iterator[None]:
    """Restore scales, learned ones too, and `use_quantization` of GRUs, also after errors.

    A block that changes scales first gives a GRU a copy of its state.

    Args:
        grus: Name -> a calibrated GRU.
    """
    before = [(gru, gru._state, gru._log2_scales, gru.use_quantization) for gru in grus.values()]
    try:
        for gru in grus.values():
            gru._follow_logarithms()
        yield
    finally:
        for gru, state, logarithms, on in before:
            gru._state, gru._log2_scales, gru.use_quantization = state, logarithms, on
