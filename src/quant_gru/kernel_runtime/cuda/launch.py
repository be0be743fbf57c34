"""Descriptions of launches: kernels by source and macros, and grids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of a source, specialized by macros. Equal kernels are the same object.

    Attributes:
        source: Name of a .cu file of the package, such as 'backward/recurrence'.
        function: Name of the function.
        macros: Names and values, sorted.
    """

    source: str
    function: str
    macros: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, source: str, function: str, macros: Mapping[str, object]) -> Kernel:
        """Return the kernel for a mapping of macros."""
        return _kernel(source, function, tuple(sorted(macros.items())))


@cache
def _kernel(source: str, function: str, macros: tuple[tuple[str, object], ...]) -> Kernel:
    return Kernel(source, function, macros)


class Grid(NamedTuple):
    """The launch dimensions of a kernel.

    Attributes:
        blocks: Blocks in x and in y.
        threads: Threads per block.
        cluster: Blocks in x that form a cluster.
        shared_bytes: Shared memory per block.
        together: Whether blocks wait for each other, so that all must be resident at once
            (cooperative launch).
        early: Whether blocks may start before the previous launch has ended; the kernel then waits
            for it. If that launch is early, too, it lets dependents start only after its own wait.
    """

    blocks: tuple[int, int]
    threads: int
    cluster: int = 1
    shared_bytes: int = 0
    together: bool = False
    early: bool = False
