"""Rules of torch.func.vmap: sequences become rows of the batch, other inputs run one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def into_rows(value: Tensor, dim: int | None, rows: int, size: int) -> Tensor:
    """Flatten batch dimension `dim`, or `size` copies, into the dimension `rows`."""
    if dim is None:
        batched = value.unsqueeze(rows).expand(*value.shape[:rows], size, *value.shape[rows:])
    else:
        batched = value.movedim(dim, rows)
    return batched.flatten(rows, rows + 1)


def one_by_one(
    op: Callable[..., Any], size: int, in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[Any, Any]:
    """Run an operator once per batch element; return stacked results (or lists) and their dims."""
    results = [
        op(*(_pick(arg, dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    stacked = tuple(_stack(each) for each in zip(*results, strict=True))
    return stacked, tuple([0] * len(t) if isinstance(t, list) else 0 for t in stacked)


def is_batched(dim: Any) -> bool:
    """Return whether a value, or one element of a list, has a batch dimension."""
    return any(map(is_batched, dim)) if isinstance(dim, list | tuple) else dim is not None


def _pick(value: Any, dim: Any, index: int) -> Any:
    if isinstance(value, list | tuple):
        dims = dim if isinstance(dim, list | tuple) else [dim] * len(value)
        return [_pick(v, d, index) for v, d in zip(value, dims, strict=True)]
    return value if dim is None else value.select(dim, index)


def _stack(values: Sequence[Any]) -> Any:
    if isinstance(values[0], list | tuple):
        return [_stack(each) for each in zip(*values, strict=True)]
    return torch.stack(list(values))
