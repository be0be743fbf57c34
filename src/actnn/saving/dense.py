"""Dense tensors, and views of them: what is held for a saved tensor."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SHARE = 4  # times the elements of a view with gaps: above, the view alone is held
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order."""
    # Most end at the first or second, which are flags.
    return (
        tensor.is_contiguous()
        or tensor.is_contiguous(memory_format=torch.channels_last)
        or _is_dense(tensor)
    )


def whole_of(tensor: Tensor) -> Tensor | None:
    """Return what is to be held for a tensor, a dense one; None if it has gaps or overlap.

    Parts of one tensor, such as queries, keys and values, share what is held, without copies.
    """
    if is_dense(tensor):
        return tensor
    base = tensor._base
    if (
        base is None
        or base.numel() > LARGEST_SHARE * tensor.numel()
        or base.dtype != tensor.dtype
        or not base.requires_grad
        or not is_dense(base)
    ):
        return None
    end = tensor.storage_offset() + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = base.storage_offset()
    inside = first <= tensor.storage_offset() and end < first + base.numel()
    return base if inside else None


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is one of several, by is_grads_batched."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)
