"""Lets streams wait for the stream that computed tensors shared by all calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch


class Streams:
    """The streams of one GPU.

    Args:
        index: Index of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._maker: torch.cuda.Stream | None = None
        self._behind: set[int] = set()
        self._lock = threading.Lock()

    def current(self) -> int:
        """Return the current stream; its further work waits until shared tensors are computed."""
        now: int = torch._C._cuda_getCurrentRawStream(self._index)
        if now not in self._behind:
            self._wait(now)
        return now

    def made(self) -> None:
        """Record that the current stream computes tensors that other streams will use.

        During graph capture this does nothing: results exist only after a replay and are not kept.
        """
        if torch._C._cuda_isCurrentStreamCapturing():
            return
        now = self.current()
        with self._lock:
            self._maker = torch.cuda.current_stream(self._index)
            self._behind = {now}

    def _wait(self, now: int) -> None:
        # A capture must not depend on other streams. Whoever begins one synchronizes the device.
        if self._maker is None or torch._C._cuda_isCurrentStreamCapturing():
            return
        with self._lock:
            torch.cuda.current_stream(self._index).wait_stream(self._maker)
            self._behind.add(now)


@functools.cache
def streams_of(index: int) -> Streams:
    """Return the streams of a GPU."""
    return Streams(index)


def native_streams(
    stream: Callable[[], int], device: torch.device
) -> tuple[Callable[[], int], Callable[[], int]]:
    """Return two functions for native code.

    The first returns the current stream. The second also makes it wait for shared tensors; native
    code calls it when the stream changes.

    Args:
        stream: `Device.stream` of the machine that runs the kernels.
        device: The device of the tensors.
    """
    if device.type == "cuda":
        # a function of torch in C, without Python code
        quick = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        return quick, stream
    return stream, stream


def made_on(device: torch.device) -> None:
    """Call `Streams.made`, if the device has streams."""
    if device.type == "cuda":
        streams_of(device.index).made()
