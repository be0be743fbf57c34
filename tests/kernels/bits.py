"""Comparison of results by their bytes: zeros have a sign, and any NaN equals any other."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, NaN where NaN is."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    ours, theirs = ours.detach().cpu(), theirs.detach().cpu()
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    word = _WORDS[ours.element_size()]
    nan = ours.isnan()
    same = ours.contiguous().view(word) == theirs.contiguous().view(word)
    return torch.equal(nan, theirs.isnan()) and bool((same | nan).all())


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """Assert what `same_bits` tells; the message says where they differ."""
    if not same_bits(ours, theirs):
        ours, theirs = ours.cpu(), theirs.cpu()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        raise AssertionError("signs of zeros differ")
