"""Compressed tables: exact, and small enough for shared memory.

Sixteen input codes share 8 bytes: a linear segment, and one correction bit per code:

    output = (base + slope * (code % 16) >> 10) + bit

Kernels read them with compressed_table.cuh.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = 16  # per segment
_UNIT = 1 << 10
_STEEPEST = (1 << 16) - 1


def most_segments(entries: int) -> int:
    """Return the number of segments that suffice for a table at any alignment, an even number."""
    return -(-(entries + CODES - 1) // (2 * CODES)) * 2


def extrapolated(outputs: Tensor, before: int, after: int) -> Tensor:
    """Extrapolate a table at both ends, so that unused entries do not prevent compression."""
    start = 2 * outputs[0] - outputs[1 : before + 1].flip(0)
    end = 2 * outputs[-1] - outputs[len(outputs) - 1 - after : -1].flip(0)
    return torch.cat([start, outputs, end])


def compress(outputs: Tensor) -> Tensor | None:
    """Compress a table.

    Args:
        outputs: int64 (entries,), zero-point-free output codes; `entries` is a multiple of 32.

    Returns:
        int32 (entries / 16, 2): the base; then the slope in the high half and the bits in the low
        half. None if the table is too curved or has a descending segment.
    """
    y = outputs.reshape(-1, CODES)
    t = torch.arange(CODES, device=y.device)
    # the least squares fit, and the chord, which suits some rounded tables better
    centred = 2 * t - (CODES - 1)
    squares = int((centred**2).sum())
    fits = (
        (2 * _UNIT * (y * centred).sum(1) / squares).round().to(torch.int64),
        ((y[:, -1] - y[:, 0]) * _UNIT / (CODES - 1)).round().to(torch.int64),
    )
    best = torch.full_like(fits[0], -1)
    slope, base = torch.zeros_like(best), torch.zeros_like(best)
    for fit in fits:
        fit = fit.clamp(0, _STEEPEST)
        least = ((y - 1) * _UNIT - fit[:, None] * t).amax(1)
        most = ((y + 1) * _UNIT - 1 - fit[:, None] * t).amin(1)
        better = most - least > best
        best = torch.where(better, most - least, best)
        slope = torch.where(better, fit, slope)
        base = torch.where(better, (least + most) >> 1, base)
    bits = y - ((base[:, None] + slope[:, None] * t) >> 10)
    if bool((best < 0).any()):
        return None
    mask = (bits << t).sum(1)
    half = slope - ((slope & 0x8000) << 1)
    return torch.stack([base, (half << 16) | mask], dim=1).to(torch.int32)
