"""Parts of the calibration data, kept to see what quantizing does to the states.

A window is up to 32 steps of one sequence, with the states from which each layer and direction
enters it. Windows are chosen by a hash of their input, so which ones are kept does not depend on
the order of the data or on its split into batches and processes.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant_gru.calibration.distributed import merge_ranks
from quant_gru.calibration.float_run import FloatWeights, float_layers

STEPS = 32
# Kept steps: as many as give this many values of one operator, and at least _LEAST.
_VALUES = 1 << 16
_LEAST = 512
# Fewer steps say too little of other data.
_FEWEST = 32

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Window:
    """Some steps of one sequence.

    Attributes:
        key: Hash of the input.
        x: (steps, C) float32.
        h0: (layers * directions, H) float32, the states before its first step in the order of
            processing.
    """

    key: int
    x: Tensor
    h0: Tensor

    @property
    def order(self) -> tuple[int, int]:
        """Sorts windows by their keys."""
        return self.key, len(self.x)


class Windows:
    """The windows with the smallest keys, up to a number of steps.

    Args:
        hidden_size: H.
    """

    def __init__(self, hidden_size: int) -> None:
        self._limit = max(_LEAST, _VALUES // hidden_size)
        self._kept: list[Window] = []
        self._steps = 0  # of all that are kept
        self._dropped: tuple[int, int] | None = None

    def add(self, x: Tensor, lengths: Tensor | None, starts: Sequence[Sequence[Tensor]]) -> None:
        """Offer all windows of a batch.

        Args:
            x: (T, N, C).
            lengths: int64 (N,), or None if all rows have T steps.
            starts: [layer * directions][window] -> (N, H), the states before windows.
        """
        T, N, C = x.shape
        if N == 0 or C == 0:
            return
        x = x.detach().to(torch.float32)
        rows = [T] * N if lengths is None else lengths.tolist()
        for index, first in enumerate(range(0, T, STEPS)):
            part = x[first : first + STEPS]
            steps = [min(STEPS, length - first) for length in rows]
            whole = [n for n, count in enumerate(steps) if count > 0]
            keys = _hashes(part, steps)
            wanted = [n for n in whole if self._takes((keys[n], steps[n]))]
            if not wanted:
                continue
            values = part[:, wanted].cpu().unbind(1)
            states = torch.stack([cell[index][wanted] for cell in starts], dim=1)
            states = states.detach().float().cpu()
            for n, value, h0 in zip(wanted, values, states, strict=True):
                self._insert(Window(keys[n], value[: steps[n]].clone(), h0.clone()))

    def merge(self, other: Windows) -> None:
        """Add the windows of another process, in place."""
        for window in other._kept:
            if self._takes(window.order):
                self._insert(window)
        if other._dropped is not None:
            self._drop(other._dropped)

    def all_reduce(self, group: Any = None) -> None:
        """Give every rank of `group` the same windows, in place; a collective."""
        merge_ranks(self, group)

    def _takes(self, order: tuple[int, int]) -> bool:
        return self._dropped is None or order < self._dropped

    def _insert(self, window: Window) -> None:
        """Keep a window; of equal inputs, silence for example, only one."""
        if not self._takes(window.order):
            return
        at = bisect.bisect_left(self._kept, window.order, key=lambda each: each.order)
        if at < len(self._kept) and self._kept[at].order == window.order:
            # not the first one to come: the order of the data must not matter
            self._kept[at] = min(self._kept[at], window, key=lambda each: each.h0.tolist())
            return
        self._kept.insert(at, window)
        self._steps += window.order[1]
        while self._steps > self._limit:
            self._drop(self._kept[-1].order)

    def _drop(self, order: tuple[int, int]) -> None:
        """Refuse everything from `order` on, now and later."""
        if self._dropped is None or order < self._dropped:
            self._dropped = order
        while self._kept and self._kept[-1].order >= self._dropped:
            self._steps -= self._kept.pop().order[1]

    @property
    def is_enough(self) -> bool:
        """Whether scales can be judged by what is kept.

        A cell whose input is always the same, such as zeros, is not judged by its few inputs.
        """
        return self._steps >= _FEWEST

    def run(self, weights: Sequence[Sequence[FloatWeights]]) -> list[list[CellSteps]]:
        """Run the float GRU on the windows, on the CPU.

        Args:
            weights: [layer][direction] -> float weights.

        Returns:
            [layer][direction] -> its steps.
        """
        windows = sorted(self._kept, key=lambda each: (-len(each.x), each.key))
        lengths = torch.tensor([len(each.x) for each in windows], device="cpu")
        x = torch.nn.utils.rnn.pad_sequence([each.x for each in windows])
        h0 = torch.stack([each.h0 for each in windows], dim=1)
        on_cpu = [[cell.to(torch.float32, "cpu") for cell in layer] for layer in weights]
        batch_sizes = [int((lengths > t).sum()) for t in range(x.shape[0])]
        found: dict[tuple[int, int], list[dict[str, Tensor]]] = {}

        def keep(layer: int, direction: int, values: dict[str, Tensor]) -> None:
            found.setdefault((layer, direction), []).append(values)

        float_layers(x, h0, lengths, on_cpu, keep)
        states = iter(h0)
        return [
            [
                _steps(found[layer, direction], next(states), batch_sizes, direction == 1)
                for direction in range(len(cells))
            ]
            for layer, cells in enumerate(weights)
        ]


@dataclass(frozen=True)
class CellSteps:
    """All steps of a cell in windows, as rows of a packed sequence.

    Attributes:
        batch_sizes: Number of windows that have step 0, 1, ..
        reverse: Whether the cell begins at the last step of a window.
        x: (rows, C) float32.
        Wx: (rows, 3H) float32, rows reset, update, candidate.
        Rh: (rows, 3H) float32.
        before: (rows, H) float32, the state before each step.
        after: (rows, H) float32, the state after it.
    """

    batch_sizes: list[int]
    reverse: bool
    x: Tensor
    Wx: Tensor
    Rh: Tensor
    before: Tensor
    after: Tensor


def _steps(
    blocks: list[dict[str, Tensor]], h0: Tensor, batch_sizes: list[int], reverse: bool
) -> CellSteps:
    """Join the blocks of a cell, which come in the order of processing."""
    blocks = blocks[::-1] if reverse else blocks
    names = ("input.x", "matmul.Wx", "matmul.Rh", "output.h")
    x, Wx, Rh, after = (torch.cat([b[name] for b in blocks]).float().contiguous() for name in names)
    steps = after.split(batch_sizes)
    before = []
    for t, size in enumerate(batch_sizes):
        if reverse:
            known = 0 if t + 1 == len(batch_sizes) else batch_sizes[t + 1]
            following = steps[t + 1] if known else after[:0]
            before.append(torch.cat((following, h0[known:size])))
        else:
            before.append(h0[:size] if t == 0 else steps[t - 1][:size])
    return CellSteps(batch_sizes, reverse, x, Wx, Rh, torch.cat(before).contiguous(), after)


def starts(out: Tensor, h0: Tensor, reverse: bool) -> list[Tensor]:
    """Return the states (N, H) before each window, in the order of windows.

    Args:
        out: (T, N, H), the states after each step; in reverse, those beyond a sequence are `h0`.
        h0: (N, H).
        reverse: Whether the cell begins at the last step.
    """
    T = out.shape[0]
    if reverse:
        return [out[t + STEPS] if t + STEPS < T else h0 for t in range(0, T, STEPS)]
    return [out[t - 1] if t else h0 for t in range(0, T, STEPS)]


def _hashes(x: Tensor, steps: list[int]) -> list[int]:
    """Return the hash of each row of x (T, N, C) float32, of its first steps[n] steps.

    The sum of all words times odd numbers, modulo 2^64, is mixed like in SplitMix64.
    """
    T, _, C = x.shape
    factors = (2 * np.arange(T * C, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    odd = torch.from_numpy(factors.view(np.int64)).to(x.device).view(T, 1, C)
    words = x.contiguous().view(torch.int32).to(torch.int64) + 1
    if min(steps, default=0) < T:
        within = torch.arange(T, device=x.device)[:, None] < torch.tensor(steps, device=x.device)
        words = words * within[:, :, None]
    sums = (words * odd).sum((0, 2)).cpu().numpy().view(np.uint64)
    with np.errstate(over="ignore"):
        z = sums + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    found: list[int] = z.tolist()
    return found
