"""Checks of the arguments of `encode`."""

from __future__ import annotations

import torch
from torch import Tensor

from actnn.codec.codes import DTYPES, MOST_BITS, UNBOUNDED, Bounds, Key
from actnn.codec.noise import RUN
from actnn.errors import ActNNError


def check(x: Tensor, bits: int | Tensor, key: Key, group: int, capacity: int | None) -> None:
    """Check the arguments of `encode`.

    Raises:
        ActNNError: An argument is not supported.
    """
    if x.dtype not in DTYPES:
        raise ActNNError(f"Expected x to be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.layout != torch.strided:
        raise ActNNError(f"Expected x to be strided, got {x.layout}")
    check_group(group)
    if key.state.dtype != torch.int64 or key.state.shape != (2,):
        got = f"{key.state.dtype} {tuple(key.state.shape)}"
        raise ActNNError(f"Expected the key's state to be int64 (2,), got {got}")
    if key.state.device != x.device:
        raise ActNNError(f"Expected the key to be on {x.device}, got {key.state.device}")
    if not 0 <= key.tensor < 1 << 32:
        raise ActNNError(f"Expected the key's tensor to be in 0..2^32-1, got {key.tensor}")
    if isinstance(bits, Tensor):
        _check_bits_of_samples(x, bits, capacity)
    elif not 1 <= bits <= MOST_BITS:
        raise ActNNError(f"Expected bits to be in 1..{MOST_BITS}, got {bits}")
    elif capacity is not None:
        raise ActNNError(f"Expected no capacity for equal bits, got {capacity}")


def check_bounds(bounds: Bounds, bits: int | Tensor) -> None:
    """Raise an ActNNError if bounds are not two numbers in order, or are for bits of samples."""
    low, high = bounds
    if not low < high:
        raise ActNNError(f"Expected bounds to be (least, largest), got {bounds}")
    if isinstance(bits, Tensor) and bounds != UNBOUNDED:
        raise ActNNError(f"Expected no bounds with bits of samples, got {bounds}")


def check_group(group: int) -> None:
    """Raise an ActNNError if a group size is not a positive multiple of 32."""
    if type(group) is not int or group < RUN or group % RUN:
        raise ActNNError(f"Expected group to be a positive multiple of {RUN}, got {group!r}")


def _check_bits_of_samples(x: Tensor, bits: Tensor, capacity: int | None) -> None:
    if x.dim() == 0 or bits.shape != (x.shape[0],):
        shape, got = tuple(x.shape), tuple(bits.shape)
        raise ActNNError(f"Expected bits to have one number per sample of x {shape}, got {got}")
    if bits.dtype.is_floating_point or bits.dtype == torch.bool:
        raise ActNNError(f"Expected bits to be integers, got {bits.dtype}")
    if bits.device != x.device:
        raise ActNNError(f"Expected bits to be on {x.device}, got {bits.device}")
    if capacity is not None and capacity < 0:
        raise ActNNError(f"Expected capacity to be at least 0, got {capacity}")
