"""The forms in which a saved tensor is held until backward."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.multiprocessing.reductions import StorageWeakRef

from actnn import codec
from actnn._errors import ActNNError
from actnn.saving.bit_masks import restore_positive


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

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the tensor, or a view of its elements."""
        ...


class Kept:
    """The tensor itself; an in-place operation after saving is an error, as in plain PyTorch."""

    __slots__ = ("__weakref__", "held", "tensor", "version")

    def __init__(self, tensor: Tensor, held: int) -> None:
        # Detached: an output that held itself through its own autograd node would never be freed.
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.held = held

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the tensor, or a view of its elements."""
        refuse_changed(self.tensor, self.version)
        if view is None:
            return self.tensor
        shape, strides, start = view
        return self.tensor.as_strided(shape, strides, self.tensor.storage_offset() + start)


class Compressed:
    """Codes of the tensor, in storage order; they fit every dense view of the same elements.

    Args:
        codes: The codes.
        positive: What `positive_mask` returned, if no element is below 0.
        by_maker: Whether the node that made the tensor saves it, too, and runs in backward at once
            after the last of the others: then the decoded tensor stays alive between them.

    Attributes:
        saves: How many nodes have saved the tensor.
    """

    __slots__ = (
        "__weakref__",
        "_alive",
        "_by_maker",
        "_codes",
        "_decoded",
        "_exact",
        "_positive",
        "_unpacked",
        "saves",
    )

    def __init__(
        self, codes: codec.Codes, positive: Tensor | None = None, by_maker: bool = False
    ) -> None:
        self._codes, self._positive, self._by_maker = codes, positive, by_maker
        self._exact: Kept | None = None
        self._decoded: StorageWeakRef | None = None
        self._alive: torch.UntypedStorage | None = None
        self.saves, self._unpacked = 1, 0

    @property
    def held(self) -> int:
        """Bytes of the codes."""
        if self._exact is not None:
            return 0  # the tensor itself counts
        return self._codes.nbytes + (0 if self._positive is None else self._positive.nbytes)

    def keep(self, exact: Kept) -> None:
        """Hold the tensor itself instead of the codes."""
        codes = self._codes
        empty = codes.data.new_empty(0)
        self._exact, self._codes = exact, replace(codes, data=empty, params=empty)

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the decoded tensor, or a view of it; one that is still alive is used again."""
        if self._exact is not None:
            return self._exact.unpack(view)
        refuse_second_derivative()
        codes = self._codes
        shape, strides, start = view or (codes.shape, codes.strides, 0)
        # An autograd node that saved one tensor twice unpacks it twice before it runs. The weak
        # reference does not prolong the life of the first, so that the peak stays.
        weak = self._decoded
        storage = None if weak is None else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is None:
            tensor = codec.decode(codes)
            if self._positive is not None:
                # The backward of ReLU passes what is above 0, however little.
                tensor = restore_positive(tensor, self._positive)
            storage = tensor.untyped_storage()
            self._decoded = StorageWeakRef(storage)
            tensor = tensor.as_strided(shape, strides, start)
        else:
            empty = torch.empty(0, dtype=codes.dtype, device=storage.device)
            tensor = empty.set_(storage, start, shape, strides)
        self._unpacked += 1
        maker_is_next = self._by_maker and -self._unpacked % self.saves == 1
        self._alive = storage if maker_is_next else None
        return tensor


class View:
    """A view of elements that are held once.

    Args:
        held: What is held.
        tensor: The view.
        whole: The dense tensor that is held.
    """

    __slots__ = ("__weakref__", "_held", "_layout")

    def __init__(self, held: Held, tensor: Tensor, whole: Tensor) -> None:
        start = int(tensor.storage_offset()) - int(whole.storage_offset())
        self._held: Held = held
        self._layout: Layout | None = Layout(tensor.shape, tensor.stride(), start)

    def keep(self, exact: Kept) -> None:
        """Hold the tensor of this layout itself."""
        if isinstance(self._held, Compressed):
            self._held.saves -= 1
        self._held, self._layout = exact, None

    def unpack(self) -> Tensor:
        """Return the elements in this layout."""
        return self._held.unpack(self._layout)


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
