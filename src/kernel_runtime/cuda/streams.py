"""Streams wait for the one on which tensors that all calls share were made."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from kernel_runtime.cuda.launch import Machine


class Streams:
    """The streams of one GPU.

    Args:
        index: Which GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._maker: torch.cuda.Stream | None = None
        self._behind: set[int] = set()
        self._lock = threading.Lock()

    def current(self) -> int:
        """The current stream, whose work from here on comes behind all that was made."""
        now: int = torch._C._cuda_getCurrentRawStream(self._index)
        if now not in self._behind:
            self._wait(now)
        return now

    def made(self) -> None:
        """Something was made on the current stream, and is kept for all.

        What a graph computes is there only after it has run, and is not kept.
        """
        if torch._C._cuda_isCurrentStreamCapturing():
            return
        now = self.current()
        with self._lock:
            self._maker = torch.cuda.current_stream(self._index)
            self._behind = {now}

    def _wait(self, now: int) -> None:
        # a capture knows nothing of other streams, and who begins one has waited for the device
        if self._maker is None or torch._C._cuda_isCurrentStreamCapturing():
            return
        with self._lock:
            torch.cuda.current_stream(self._index).wait_stream(self._maker)
            self._behind.add(now)


@functools.cache
def streams_of(index: int) -> Streams:
    """The streams of a GPU."""
    return Streams(index)


def native_streams(
    machine: Machine, device: torch.device
) -> tuple[Callable[[], int], Callable[[], int]]:
    """What gives native code the current stream, and what has one wait that it has not seen."""
    if device.type == "cuda":
        # without a step of Python
        quick = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        return quick, machine.stream
    return machine.stream, machine.stream


def made_on(device: torch.device) -> None:
    """As `Streams.made`; nothing where the device has no streams."""
    if device.type == "cuda":
        streams_of(device.index).made()
