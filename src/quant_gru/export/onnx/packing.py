"""pack_padded_sequence and pad_packed_sequence while a model is traced for ONNX.

Torch's rows of a PackedSequence have a size that depends on values. While a model is traced, its
PackedSequences keep padded rows (T, N, C), and batch_sizes are lengths (N,).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
    return data, torch.as_tensor(lengths).to(torch.int64)


def _pad(
    data: Tensor, lengths: Tensor, batch_first: bool, value: float, total: int | None
) -> tuple[Tensor, Tensor]:
    T = data.shape[0]
    runs = torch.arange(T, device=data.device)[:, None] < lengths.to(data.device)
    y = torch.where(runs[..., None], data, torch.full((), value, dtype=data.dtype))
    return (y.transpose(0, 1) if batch_first else y), lengths
