"""Saved tensors in host memory: copied by a stream of their own, and fetched ahead of use."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from actnn import codec
from actnn.errors import ActNNError
from actnn.saving.bit_masks import restore_positive
from actnn.saving.dense import is_dense
from actnn.saving.held import Kept, Layout, counter_of, refuse_changed, refuse_second_derivative

PREFETCH = 2  # tensors that are fetched before backward asks for them


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def can_leave(tensor: Tensor) -> bool:
    """Whether a tensor is on a device with a memory of its own."""
    return tensor.is_cuda


def part_sizes(nbytes: int) -> list[int]:
    """Return the sizes of the pinned blocks for so many bytes.

    PyTorch's allocator takes powers of 2 of pinned memory: for one block up to twice the bytes,
    for these at most a sixteenth more.
    """
    sizes, left = [], nbytes
    while left:
        above = 1 << (left - 1).bit_length()
        sizes.append(left if 16 * (above - left) <= nbytes else above // 2)
        left -= sizes[-1]
    return sizes


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in the order of its memory: uint8 (bytes,), a view."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Queue:
    """The tensors of one step in host memory, in the order of saving; backward asks in reverse."""

    def __init__(self) -> None:
        self._items: list[weakref.ref[Offloaded]] = []

    def append(self, item: Offloaded) -> int:
        """Append a tensor and return its position."""
        self._items.append(weakref.ref(item))
        return len(self._items) - 1

    def fetch_before(self, position: int) -> None:
        """Start fetching the tensors that backward needs after the one at a position."""
        for reference in self._items[max(0, position - PREFETCH) : position]:
            item = reference()
            if item is not None:
                item.fetch()


class Offloaded:
    """A tensor, or its codes, in pinned host memory.

    The caching allocator of PyTorch owns the pinned memory and uses it again for later steps.

    Args:
        content: The tensor or its codes; the parameters of codes stay on the device.
        queue: The other tensors of the step.
        positive: See `Compressed`; stays on the device.
    """

    __slots__ = (
        "__weakref__",
        "_back",
        "_codes",
        "_counter",
        "_device",
        "_exact",
        "_host",
        "_layout",
        "_position",
        "_positive",
        "_queue",
        "_version",
    )

    def __init__(
        self, content: Tensor | codec.Codes, queue: Queue, positive: Tensor | None = None
    ) -> None:
        codes = content if isinstance(content, codec.Codes) else None
        tensor = content.data if isinstance(content, codec.Codes) else content.detach()
        self._codes = None if codes is None else replace(codes, data=codes.data.new_empty(0))
        self._device = tensor.device
        self._queue = queue
        self._positive = positive
        self._exact: Kept | None = None
        self._version = tensor._version
        self._counter = counter_of(tensor)
        if not is_dense(tensor):
            tensor = tensor.clone()
        self._layout = tensor.shape, tensor.stride(), tensor.dtype
        self._back: tuple[Tensor, torch.cuda.Event] | None = None
        self._host = self._leave(tensor)
        self._position = queue.append(self)

    @property
    def held(self) -> int:
        """Bytes on the device."""
        if self._exact is not None:
            return 0  # the tensor itself counts
        parts = (self._codes and self._codes.params, self._positive)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(part.nbytes for part in self._host)

    @property
    def codes(self) -> tuple[Any, int, torch.Size] | None:
        """See `Held`."""
        found = self._codes if self._exact is None else None
        if found is None:
            return None
        return (found.data, found.params), len(found.params), found.shape

    def _leave(self, tensor: Tensor) -> list[Tensor]:
        """Start the copy of a dense tensor to the host, and return its parts there."""
        if torch.cuda.is_current_stream_capturing():
            raise ActNNError(
                "Expected no tensor to move to host memory in a CUDA graph, got a step that is "
                "captured; choose 'compress' for it"
            )
        stream = _copy_stream(self._device)
        sizes = part_sizes(tensor.nbytes)
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for part, source in zip(host, _bytes_of(tensor).split(sizes), strict=True):
                part.copy_(source, non_blocking=True)
        tensor.record_stream(stream)
        return host

    def keep(self, exact: Kept) -> None:
        """Hold the tensor itself on its device if it would be rounded."""
        if self._codes is not None:
            self._exact = exact

    def fetch(self) -> None:
        """Start the copy back to the device, unless it is there."""
        if self._back is None and self._exact is None:
            self._back = self._copy()

    def _copy(self) -> tuple[Tensor, torch.cuda.Event]:
        stream = _copy_stream(self._device)
        shape, strides, dtype = self._layout
        with torch.cuda.stream(stream):
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
            sizes = [part.nbytes for part in self._host]
            for part, target in zip(self._host, _bytes_of(tensor).split(sizes), strict=True):
                target.copy_(part, non_blocking=True)
        return tensor, stream.record_event()

    def unpack(self, view: Layout | None = None) -> Tensor:
        """Return the tensor on its device, and start fetching those that come next."""
        if self._exact is not None:
            return self._exact.unpack(view)
        refuse_changed(self._counter, self._version)
        back, self._back = self._back, None
        tensor, event = back or self._copy()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        tensor.record_stream(current)
        self._queue.fetch_before(self._position)
        if self._codes is not None:
            refuse_second_derivative()
            tensor = codec.decode(replace(self._codes, data=tensor))
            if self._positive is not None:
                tensor = restore_positive(tensor, self._positive)
        return tensor if view is None else tensor.as_strided(*view)
