"""Calibrates a GRU once for many tests: `kept` returns copies, `shared` what nobody changes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from quant_gru import QuantGRU

Made = TypeVar("Made")


def _once(make: Callable[..., Made], of: Callable[[Made], Made]) -> Callable[..., Made]:
    """Make each result once, for its arguments and random state, and leave the state after it."""
    made: dict[bytes, tuple[Made, torch.Tensor]] = {}

    @functools.wraps(make)
    def get(*args: Any, **options: Any) -> Made:
        state = torch.get_rng_state().numpy().tobytes()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = pickle.dumps((args, sorted(options.items()), state, modes))
        if key in made:
            torch.set_rng_state(made[key][1])
        else:
            made[key] = make(*args, **options), torch.get_rng_state()
        return of(made[key][0])

    return get


def kept(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return a copy of what `make` returned for the same arguments and random state."""
    return _once(make, copy.deepcopy)


def shared(make: Callable[..., Made]) -> Callable[..., Made]:
    """Return what `make` returned for the same arguments and random state."""
    return _once(make, lambda result: result)


@kept
def calibrated_gru(
    C: int,
    H: int,
    config: Any = "int8",
    *,
    data: tuple[int, ...] = (12, 4),
    seed: int | None = 0,
    **options: Any,
) -> QuantGRU:
    """A QuantGRU in eval mode that runs in integers; `data` are the steps and rows it has seen."""
    if seed is not None:
        torch.manual_seed(seed)
    gru = QuantGRU(C, H, config=config, **options).eval()
    gru.calibrate(torch.randn(*data, C))
    gru.finalize_calibration()
    gru.use_quantization = True
    return gru
