"""Lossy compression of the states that backward reads, for states with many bits."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.quantizer import Quantizer

CHOICES = (4, 8)


def packed(codes: Tensor, quantizer: Quantizer, bits: int) -> Tensor:
    """Round codes to their leading bits; two 4-bit codes share a byte.

    Args:
        codes: Codes of output.h (T, N, H).
        quantizer: Their quantizer.
        bits: 4 or 8; narrower codes are returned unchanged.

    Returns:
        uint8 (T, N, H), or (T, N, ceil(H / 2)) for 4 bits; the codes themselves if narrow.
    """
    drop = quantizer.bits - bits
    if drop <= 0:
        return codes
    from_zero = codes.to(torch.int32 if quantizer.bits < 31 else torch.int64) - quantizer.lo
    short = ((from_zero + (1 << (drop - 1))) >> drop).clamp_(max=(1 << bits) - 1).to(torch.uint8)
    if bits == 8:
        return short
    if short.shape[-1] % 2:
        short = torch.nn.functional.pad(short, (0, 1))
    return short[..., ::2] | short[..., 1::2] << 4


def unpacked(stash: Tensor, quantizer: Quantizer, bits: int, hidden_size: int) -> Tensor:
    """Return codes of output.h (T, N, H) in their container, from the result of `packed`.

    Args:
        stash: The result of `packed`.
        quantizer: The quantizer of the codes.
        bits: The value passed to `packed`.
        hidden_size: H.
    """
    drop = quantizer.bits - bits
    if drop <= 0:
        return stash
    if bits == 4:
        stash = torch.stack((stash & 15, stash >> 4), dim=-1).flatten(-2)[..., :hidden_size]
    codes = (stash.to(torch.int64) << drop) + quantizer.lo
    return codes.to(quantizer.container)
