"""The codec as plain PyTorch operations, which compilers fuse with what makes and uses the tensor.

The format is that of the other executors, so each can decode the codes of the others. Noise is a
hash in 32-bit arithmetic instead of Philox, so the codes differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actnn.codec.memory_order import flat
from actnn.codec.noise import RUN
from actnn.codec.packing import pack, unpack
from actnn.codec.reference import in_bfloat16, parameters

_GOLDEN = 0x9E3779B9


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _hash(v: Tensor) -> Tensor:
    """Mix the bits of int32 numbers; a bijection. Products wrap around.

    Source: C. Wellons, "Prospecting for hash functions", 2018 (the two-round hash of low bias).
    """
    v = v ^ (v >> 16 & 0xFFFF)
    v = v * _signed(0x7FEB352D)
    v = v ^ (v >> 15 & 0x1FFFF)
    v = v * _signed(0x846CA68B)
    return v ^ (v >> 16 & 0xFFFF)


def _noise(n: int, state: Tensor, tensor: int) -> Tensor:
    """Return float32 (n,) noise in (0, 1), multiples of 2^-24 plus 2^-25."""
    words = state.to(torch.int32)  # the low words
    high = (state >> 32).to(torch.int32)
    key = _hash(_hash(words[0] + _signed(_GOLDEN)) ^ high[0])
    key = _hash(key + words[1] * _signed(_GOLDEN) + _signed(tensor))
    index = torch.arange(n, dtype=torch.int32, device=state.device)
    v = _hash(_hash(index ^ key) + key)
    return ((v >> 8 & 0xFFFFFF).to(torch.float32) + 0.5) * 2.0**-24


def encode(
    x: Tensor, bits: int, group: int, state: Tensor, tensor: int, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Encode a dense tensor of fewer than 2^31 elements.

    Args:
        x: Any floating dtype.
        bits: Bits of a code, 1 to 8.
        group: Elements of a group, a multiple of 32.
        state: int64 (2,), seed and step of the noise.
        tensor: Id of the tensor.
        stochastic: Whether codes are rounded stochastically, else to the nearest code.

    Returns:
        data, uint8, and params, bfloat16 (groups, 2).
    """
    n = x.numel()
    groups, whole = -(-n // group), -(-n // RUN) * RUN
    v = flat(x).to(torch.float32)
    if groups * group != n:
        v = torch.cat((v, v[-1:].expand(groups * group - n)))
    base, step, inverse = parameters(v.view(1, -1), bits, group)
    distance = v.view(groups, group) - base.view(-1, 1)
    noise: Tensor | float = 0.5
    if stochastic:
        noise = _noise(groups * group, state, tensor).view(groups, group)
    codes = (distance * inverse.view(-1, 1) + noise).floor().clamp(0, 2**bits - 1)
    codes = torch.where(torch.isnan(base).view(-1, 1), 0.0, codes).to(torch.int32).view(-1)[:whole]
    if whole != n:
        codes = torch.cat((codes[:n], codes.new_zeros(whole - n)))
    return pack(codes, bits), in_bfloat16(torch.stack((base, step), -1))


def decode(
    data: Tensor, params: Tensor, bits: int, group: int, n: int, dtype: torch.dtype
) -> Tensor:
    """Decode elements (n,) in the order of memory.

    Args:
        data: uint8.
        params: bfloat16 (groups, 2).
        bits: Bits of a code.
        group: Elements of a group.
        n: Number of elements.
        dtype: dtype of the result.
    """
    groups = params.shape[0]
    codes = unpack(data, bits)
    if groups * group != codes.shape[0]:
        codes = torch.cat((codes, codes.new_zeros(groups * group - codes.shape[0])))
    base, step = params.to(torch.float32).view(groups, 2, 1).unbind(1)
    v = (base + codes.view(groups, group).to(torch.float32) * step).view(-1)[:n]
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        v = v.clamp(-most, most)
    return v.to(dtype)
