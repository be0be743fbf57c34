"""The noise of stochastic rounding: 16 bits for each element, by Philox4x32 with 7 rounds.

Noise depends only on a seed, a step, a tensor and the position of an element, so every executor
draws the same one, in any order.
Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
RUN = 32
"""Neighbouring elements whose codes fill whole 32-bit words."""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LONG = (1 << 64) - 1


def philox(
    counter: Sequence[Tensor | int], key: tuple[Tensor | int, Tensor | int], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit random words for each counter.

    Args:
        counter: Four words, int64 in 0..2^32-1 that broadcast with each other; one is a tensor.
        key: Two words.
        rounds: Number of rounds.

    Returns:
        int64 of the counters' broadcast shape, in 0..2^32-1.
    """
    device = next(word.device for word in counter if isinstance(word, Tensor))
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(word, dtype=torch.int64, device=device) for word in counter)
    )
    key0, key1 = key
    for _ in range(rounds):
        # 64-bit products wrap around; their bits are correct
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _WORD) ^ c1 ^ key0,
            p1 & _WORD,
            ((p0 >> 32) & _WORD) ^ c3 ^ key1,
            p0 & _WORD,
        )
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def noise_of(state: Tensor, tensor: int, runs: int) -> Tensor:
    """Return 16 bits of noise for each element.

    Two runs share 8 blocks. Block j has the noise of elements 4j..4j+3 of both runs.

    Args:
        state: int64 (2,), the seed and the step.
        tensor: Id of the tensor within the step, in 0..2^32-1.
        runs: Number of runs of 32 elements.

    Returns:
        int64 (runs, 32), in 0..65535.
    """
    block = torch.arange(8 * -(-runs // 2), dtype=torch.int64, device=state.device)
    seed, step = state.unbind()
    words = torch.stack(
        philox(
            (block & _WORD, block >> 32, tensor, step & _WORD),
            (seed & _WORD, (seed >> 32) & _WORD),
        ),
        1,
    )
    halves = torch.stack((words & 0xFFFF, words >> 16), 2)  # (blocks, 4, 2)
    # pairs of runs, block, run of the pair, element
    return halves.view(-1, 8, 2, 4).transpose(1, 2).reshape(-1, RUN)[:runs]


def noise_state(
    seed: int, *, rank: int = 0, step: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the state of a `Key`: a seed that differs between ranks, and a step.

    Args:
        seed: The user's seed.
        rank: Rank of the process; noise of different ranks is independent.
        step: First step.
        device: Device of the data.

    Returns:
        int64 (2,). A step is advanced by `state[1] += 1`, which a CUDA graph can capture.
    """
    mixed = _mixed(seed + 0x9E3779B97F4A7C15 * (rank + 1))
    signed = mixed - (1 << 64) if mixed >> 63 else mixed
    return torch.tensor([signed, step], dtype=torch.int64, device=device)


def _mixed(v: int) -> int:
    """SplitMix64: a bijection of 64 bits in which every input bit changes half of the outputs."""
    v &= _LONG
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9 & _LONG
    v = (v ^ (v >> 27)) * 0x94D049BB133111EB & _LONG
    return v ^ (v >> 31)
