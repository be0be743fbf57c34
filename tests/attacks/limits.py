"""What an attack may cost."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quant_gru import QuantGRUError

MIB = 1 << 20


@contextmanager
def memory(most: int, seconds: float = 30) -> Iterator[None]:
    """Run a block that can allocate no more than `most` bytes at a time, and that ends soon."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs Linux, to limit memory")
    now = int(status.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + most, before[1]))
    start = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < seconds


@contextmanager
def refused(message: str, most: int = 64 * MIB) -> Iterator[None]:
    """Run a block that must raise an error of ours, without much memory."""
    with memory(most), pytest.raises(QuantGRUError, match=message):
        yield
