"""Which windows of the calibration data are kept."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from quant_gru.calibration.windows import _LEAST, STEPS, Windows


def windows_of(batches: list[tuple[Tensor, list[int]]]) -> Windows:
    """Windows of batches x (T, N, 1) with lengths, with states that do not matter."""
    found = Windows(hidden_size=1 << 17)
    for x, lengths in batches:
        T, N, _ = x.shape
        starts = [[torch.zeros(N, 1)] * -(-T // STEPS)]
        found.add(x, torch.tensor(lengths), starts)
    return found


def orders(windows: Windows) -> list[tuple[int, int]]:
    """The keys and steps of kept windows."""
    return [each.order for each in windows._kept]


def expected(every: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first of all windows; equal ones count once."""
    found: list[tuple[int, int]] = []
    for each in sorted(set(every)):
        if sum(steps for _, steps in [*found, each]) > _LEAST:
            break
        found.append(each)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_kept_windows_do_not_depend_on_the_order(seed: int) -> None:
    """Sequences of all lengths, some of them twice, one at a time and in larger batches."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lengths = [rng.choice((5, 7, 32, 40, 70)) for _ in range(70)]
    sequences = [torch.rand(length, 1, 1) for length in lengths]
    sequences += rng.sample(sequences, 20)
    every = [o for x in sequences for o in orders(windows_of([(x, [len(x)])]))]
    assert sum(steps for _, steps in every) > _LEAST
    for size in (1, 4, len(sequences)):
        rng.shuffle(sequences)
        batches = []
        for first in range(0, len(sequences), size):
            part = sequences[first : first + size]
            padded = torch.nn.utils.rnn.pad_sequence([x[:, 0] for x in part])
            batches.append((padded, [len(x) for x in part]))
        assert orders(windows_of(batches)) == expected(every)


def test_merged_windows_are_those_of_all_data() -> None:
    sequences = [(torch.rand(length, 1, 1), [length]) for length in range(1, 70)]
    merged = windows_of(sequences[:50])
    merged.merge(windows_of(sequences[50:]))
    assert orders(merged) == orders(windows_of(sequences))


def test_silence_takes_no_place_of_other_data() -> None:
    """Of windows with the same input one is kept, with the same states in any order."""
    voices = torch.randn(STEPS, 10, 1)
    x = torch.cat((voices, torch.zeros(STEPS, 100, 1)), dim=1)
    states = torch.rand(110, 2)
    contents = []
    for order in (torch.arange(110), torch.arange(110).flip(0), torch.randperm(110)):
        found = Windows(hidden_size=1 << 17)
        found.add(x[:, order], None, [[states[order]]])
        assert len(found._kept) == 11
        contents.append([(each.key, each.h0.tolist()) for each in found._kept])
    assert contents[0] == contents[1] == contents[2]
