"""Encoded tensors, their keys, and their size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from actnn.codec.noise import RUN

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The dtypes of elements; kernels number them in this order."""

MOST_BITS = 8

Bounds: TypeAlias = tuple[float, float]
"""The least and the largest element that a tensor can have, as float32 numbers. Elements at or
beyond a bound decode to it exactly, all others to numbers between them."""

UNBOUNDED: Bounds = (-math.inf, math.inf)

LARGEST = torch.finfo(torch.bfloat16).max
"""From here on numbers count as infinite."""


def reached(bounds: Bounds) -> Bounds:
    """Return the numbers at and beyond which elements are at a bound."""
    return max(bounds[0], -LARGEST), min(bounds[1], LARGEST)


class Key(NamedTuple):
    """What makes noise independent.

    Attributes:
        state: int64 (2,), the seed with the rank mixed in and the step, on the device of the data.
            `noise_state` makes one. A captured CUDA graph may advance the step.
        tensor: Id of the tensor within the step, in 0..2^32-1.
    """

    state: Tensor
    tensor: int


@dataclass
class Codes:
    """An encoded tensor.

    Attributes:
        data: Packed codes, uint8.
        params: Base and step of each group, bfloat16 (groups, 2).
        bits: Bits of a code, or those of each sample: integers (samples,).
        group: Elements of a group.
        shape: Shape of the encoded tensor.
        strides: Strides of the decoded tensor.
        dtype: dtype of the encoded tensor.
        ends: Inclusive sums of the bits of samples, int64 (samples,); None if not computed yet.
        bounds: Of the elements.
    """

    data: Tensor
    params: Tensor
    bits: int | Tensor
    group: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    ends: Tensor | None = None
    bounds: Bounds = UNBOUNDED

    @property
    def nbytes(self) -> int:
        """Bytes of codes and parameters."""
        return self.data.nbytes + self.params.nbytes

    @property
    def flags(self) -> Tensor:
        """Number of groups that decode to NaN: int32 (1,), on the device of the codes.

        A group does so if it contains NaN or a float64 number beyond float32, or if its range
        overflows; with 1 bit, also if it has elements both at the bounds and between them. With
        bits per sample, so do groups beyond the capacity.
        """
        return torch.isnan(self.params[:, 0]).sum(dtype=torch.int32).view(1)


def data_bytes(elements: int, bits: int) -> int:
    """Return the bytes of packed codes: whole runs of 32 codes."""
    return -(-elements // RUN) * bits * (RUN // 8)


def bytes_of(n: int, bits: int, group: int = 256) -> int:
    """Return the bytes of an encoded tensor: codes, and 4 bytes for each group.

    Args:
        n: Number of elements.
        bits: Bits of a code.
        group: Elements of a group.
    """
    return data_bytes(n, bits) + 4 * -(-n // group)
