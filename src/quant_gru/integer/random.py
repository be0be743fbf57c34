"""Random bits that depend only on a seed and a position: Philox4x32-10.

Every executor draws the same masks, in any order and any number of times. Backward draws the masks
of forward again instead of storing them.
Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# The fourth word of a counter is the stream: the purpose of the bits plus layer * 2 + direction.
ZONEOUT, RECURRENT, BETWEEN_LAYERS = 0, 1 << 30, 2 << 30


def philox(counter: Sequence[Tensor | int], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit random words for each counter.

    Args:
        counter: Four words, integers in 0..2^32-1 that broadcast with each other.
        seed: int64 scalar, the key, on the device of the result.

    Returns:
        int64 of the counters' broadcast shape, in 0..2^32-1.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(word, dtype=torch.int64, device=seed.device) for word in counter)
    )
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(_ROUNDS):
        # 64-bit products wrap around; their bits are correct
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & WORD) ^ c1 ^ key0,
            p1 & WORD,
            ((p0 >> 32) & WORD) ^ c3 ^ key1,
            p0 & WORD,
        )
        key0, key1 = (key0 + _WEYL[0]) & WORD, (key1 + _WEYL[1]) & WORD
    return c0, c1, c2, c3


def chance(p: float) -> int:
    """Return a probability in units of 2^-32: a word is below it with probability `p`."""
    return round(p * (1 << 32))


def events(seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
    """Draw where an event with probability `p` occurs.

    Args:
        seed: int64 scalar.
        p: Probability.
        shape: (A, B, C); position (a, b, c) has the counter (a, b, c, stream).
        stream: Purpose of the bits, the fourth word of the counters.

    Returns:
        bool (A, B, C).
    """
    a, b, c = (torch.arange(size, device=seed.device) for size in shape)
    word = philox((a[:, None, None], b[:, None], c, stream), seed)[0]
    return word < chance(p)
