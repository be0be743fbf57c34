"""Descriptions of launches: kernels by source and macros, grids, and machines that run them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.cublaslt import Product


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


class Prepared(Protocol):
    """Launches that can be started repeatedly; each start reads the arguments."""

    @property
    def native(self) -> _native.Launches:
        """The same launches for native code; this object must be kept alive as long."""
        ...

    def start(self, stream: int) -> None:
        """Start the kernels on a stream, in order."""
        ...


class Multiplication(NamedTuple):
    """A prepared GEMM.

    Attributes:
        launch: The launch of the GEMM.
        record: The addresses of its matrices and its workspace, see `cublaslt.Described`.
        workspace: Size of its workspace in bytes.
    """

    launch: Prepared
    record: Any
    workspace: int


class Machine(Protocol):
    """A machine that runs kernels: a GPU, or the host in tests.

    Attributes:
        arch: The architecture for which kernels are compiled, such as 'sm_90a'.
    """

    arch: str

    def clusters(self) -> Mapping[int, int]:
        """Return blocks per cluster -> number of such clusters that run at once."""
        ...

    def expect(self, kernel: Kernel) -> None:
        """Start compiling a kernel that will be prepared or launched."""
        ...

    def launch(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> None:
        """Start a kernel on the current stream."""
        ...

    def prepare(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> Prepared:
        """Prepare a launch of a kernel that can be started repeatedly."""
        ...

    def multiply(self, product: Product) -> Multiplication | None:
        """Prepare a GEMM; return None if torch has to compute it."""
        ...

    def join(self, launches: Sequence[Any]) -> Prepared:
        """Combine launches that this machine has prepared into one that starts all in order."""
        ...

    def raise_for(self, status: int) -> None:
        """Raise the error for the status of a launch in native code."""
        ...

    def stream(self) -> int:
        """Return the current stream, which waits for tensors shared by all calls."""
        ...
