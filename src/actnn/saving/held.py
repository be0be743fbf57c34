"""The forms in which a saved tensor is held until backward."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from actnn.errors import ActNNError
from actnn.saving._native import Compressed, Kept, View

__all__ = ["Compressed", "Held", "Kept", "Layout", "View"]


class Layout(NamedTuple):
    """A view of a dense tensor: shape, strides, and the element at which it begins."""

    shape: torch.Size
    strides: tuple[int, ...]
    start: int


class Held(Protocol):
    """One saved tensor, or several that share a storage."""

    @property
    def held(self) -> int:
        """Bytes on the device of the tensor."""
        ...

    @property
    def codes(self) -> tuple[Any, int, torch.Size] | None:
        """Its codes and their parameters, their groups, and its shape; None if it is exact."""
        ...

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the tensor, or a view of its elements."""
        ...


def view_of_storage(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    start: int,
    shape: torch.Size,
    strides: tuple[int, ...],
) -> Tensor:
    """Return a tensor of a storage."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, start, shape, strides)


def counter_of(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose `_version` is always that of a tensor, without its memory."""
    counter = tensor.detach()
    with _unsafe_preserve_version_counter(counter):
        counter.set_()  # type: ignore[call-overload]
    return counter


def refuse_changed(tensor: Tensor, version: int) -> None:
    """Raise if a tensor was changed in place after it was saved at a version."""
    if tensor._version != version:
        raise RuntimeError(
            "Expected a tensor that was saved for backward to stay as it was, got "
            f"{list(tensor.shape)} of {tensor.dtype} changed by an in-place operation: saved at "
            f"version {version}, now {tensor._version}"
        )


def refuse_second_derivative(
    what: str = "compressed tensors", instead: str = "bits=32 (for fit: bits=())"
) -> None:
    """Raise if backward builds a graph: derivatives of rounded values would not be right.

    Args:
        what: What backward goes through.
        instead: The setting that allows second derivatives.
    """
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        raise ActNNError(
            f"Expected backward through {what} to be without create_graph, got "
            f"create_graph=True; second derivatives need {instead}"
        )
