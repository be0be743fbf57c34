"""What is launched and where: kernels by source and macros, grids, and machines to run them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from kernel_runtime import _native
from kernel_runtime.cuda.cublaslt import Product


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of a source, specialized by macros; the same ones are the same object.

    Attributes:
        source: Name of a .cu file of the package, such as 'backward/recurrence'.
        function: Its function.
        macros: Names and values, sorted.
    """

    source: str
    function: str
    macros: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, source: str, function: str, macros: Mapping[str, object]) -> Kernel:
        """From a mapping of macros."""
        return _kernel(source, function, tuple(sorted(macros.items())))


@cache
def _kernel(source: str, function: str, macros: tuple[tuple[str, object], ...]) -> Kernel:
    return Kernel(source, function, macros)


class Grid(NamedTuple):
    """How a kernel is spread over a device.

    Attributes:
        blocks: Blocks in x and in y.
        threads: Threads of a block.
        cluster: Blocks in x that form a cluster.
        shared_bytes: Shared memory of a block.
        together: Whether blocks wait for each other: all of them have to be there at once.
        early: Whether blocks may start before the launch ahead has ended, and wait for it
            themselves; if that launch is early, too, it lets others start after it has waited.
    """

    blocks: tuple[int, int]
    threads: int
    cluster: int = 1
    shared_bytes: int = 0
    together: bool = False
    early: bool = False


class Prepared(Protocol):
    """Launches that can be started again and again; arguments are read at each start."""

    @property
    def native(self) -> _native.Launches:
        """The same launches, as native code starts them; these are to be kept as long."""
        ...

    def start(self, stream: int) -> None:
        """Start the kernels on a stream, one after the other."""
        ...


class Multiplication(NamedTuple):
    """A prepared product of matrices.

    Attributes:
        launch: What starts it.
        record: Where it finds its matrices and its workspace, see `cublaslt.Described`.
        workspace: Bytes of its workspace.
    """

    launch: Prepared
    record: Any
    workspace: int


class Machine(Protocol):
    """What runs kernels: a GPU, or in tests the host.

    Attributes:
        arch: What kernels are compiled for, such as 'sm_90a'.
    """

    arch: str

    def clusters(self) -> Mapping[int, int]:
        """Blocks of a cluster -> how many such clusters run at once."""
        ...

    def expect(self, kernel: Kernel) -> None:
        """Begin to compile a kernel that will be prepared or launched."""
        ...

    def launch(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> None:
        """Start a kernel on the current stream."""
        ...

    def prepare(
        self, kernel: Kernel, grid: Grid, arguments: ctypes.Structure | ctypes.Array[Any]
    ) -> Prepared:
        """Load a kernel and keep what its launches share."""
        ...

    def multiply(self, product: Product) -> Multiplication | None:
        """Prepare a product; None where torch has to make it."""
        ...

    def join(self, launches: Sequence[Any]) -> Prepared:
        """What this machine has prepared, as one that starts all of it in turn."""
        ...

    def raise_for(self, status: int) -> None:
        """Raise the error that a launch in native code returned."""
        ...

    def stream(self) -> int:
        """The current stream, to which prepared launches go, behind what was made for all."""
        ...
