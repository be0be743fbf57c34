"""pack_padded_sequence and pad_packed_sequence while a model is traced for ONNX.

Torch's rows of a PackedSequence have a size that depends on values. While a model is traced, its
PackedSequences keep padded rows (T, N, C), and batch_sizes are lengths (1, N). That first size is
what torch gives `_pad` as total_length if the model gives none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


@contextmanager
def padded() -> Iterator[None]:
    """Let PackedSequences be padded."""
    functions: Any = torch._VF
    functions._pack_padded_sequence, functions._pad_packed_sequence = _pack, _pad
    try:
        yield
    finally:
        del functions._pack_padded_sequence, functions._pad_packed_sequence


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    data = input.transpose(0, 1) if batch_first else input
    return data, torch.as_tensor(lengths).to(torch.int64)[None]


def _pad(
    data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    T, lengths = data.shape[0], sizes[0]
    runs = torch.arange(T, device=data.device)[:, None] < lengths.to(data.device)
    padding = torch.full((), value, dtype=data.dtype, device=data.device)
    y = torch.where(runs[..., None], data, padding)
    if type(total) is int and total == 1:
        y = y.narrow(0, 0, _longest(lengths, T))
    elif not statically_known_true(total == T):
        more = padding.expand(total, y.shape[1], y.shape[2])
        y = torch.cat((y, more)).narrow(0, 0, total)
    return (y.transpose(0, 1) if batch_first else y), lengths


def _longest(lengths: Tensor, T: int) -> int:
    """Return the steps of the longest row, a size that depends on values."""
    longest: Any = lengths.max().item()
    torch._check(longest >= 0)
    torch._check(longest <= T)
    return longest  # type: ignore[no-any-return]
