"""Elements in the order of memory, in which they are encoded."""

from __future__ import annotations

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """Return x if its elements fill its memory without gaps or overlap, else a contiguous copy."""
    if torch.compiler.is_compiling() or x.is_neg():
        x = x.resolve_neg()
    if x.is_contiguous():
        return x
    x = x.detach()
    # compilers can follow a search, but not sorting
    left, expected = [each for each in zip(x.stride(), x.shape, strict=True) if each[1] != 1], 1
    while left:
        found = [each for each in left if each[0] == expected]
        if not found:
            return x.contiguous()
        left.remove(found[0])
        expected *= found[0][1]
    return x


def order_of(x: Tensor) -> list[int]:
    """Return the dimensions of x in the order of its memory, by strides alone."""
    return sorted(range(x.dim()), key=lambda dim: x.stride(dim), reverse=True)


def in_rows(x: Tensor) -> Tensor:
    """Return x if it is dense and every sample is a block of memory, else a contiguous copy."""
    x = dense(x)
    samples = x.shape[0]
    if samples > 1 and x.numel() and x.stride(0) * samples != x.numel():
        return x.contiguous()
    return x


def flat(x: Tensor) -> Tensor:
    """Return the elements (n,) of a dense tensor in the order of its memory, without a copy."""
    return x.detach().as_strided((x.numel(),), (1,))


def rows_of(x: Tensor) -> Tensor:
    """Return the elements (samples, m) of a tensor from `in_rows`, without a copy."""
    samples = x.shape[0]
    return x.detach().as_strided(
        (samples, x.numel() // max(samples, 1)), (x.numel() // max(samples, 1), 1)
    )
