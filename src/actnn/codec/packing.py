"""Packed codes: a little-endian bit stream in which 8 neighbours fill `bits` bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes.

    Args:
        codes: Integers (..., 8 k) in 0..2^bits-1.
        bits: Bits of a code, 1 to 8.

    Returns:
        uint8 (..., bits k).
    """
    if bits == 8:
        return codes.to(torch.uint8)
    places = torch.arange(8, dtype=torch.int64, device=codes.device)
    long: Tensor = (codes.to(torch.int64).unflatten(-1, (-1, 8)) << (places * bits)).sum(-1)
    return (long.unsqueeze(-1) >> (8 * places[:bits]) & 255).to(torch.uint8).flatten(-2)


def unpack(data: Tensor, bits: int) -> Tensor:
    """Reverse `pack`.

    Args:
        data: uint8 (..., bits k).
        bits: Bits of a code, 1 to 8.

    Returns:
        Codes, int32 (..., 8 k).
    """
    if bits == 8:
        return data.to(torch.int32)
    places = torch.arange(8, dtype=torch.int64, device=data.device)
    long: Tensor = (data.to(torch.int64).unflatten(-1, (-1, bits)) << (8 * places[:bits])).sum(-1)
    mask = (1 << bits) - 1
    return (long.unsqueeze(-1) >> (places * bits) & mask).to(torch.int32).flatten(-2)
