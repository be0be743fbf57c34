"""The compiler and its cache, GPUs, prepared launches and their arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quant_gru.kernel_runtime.cuda.launch import Grid

NVRTC_FUNCTIONS: tuple[str, ...]

class Compiler:
    """Compiles CUDA sources with NVRTC. Macros are names and values."""

    # addresses: of NVRTC_FUNCTIONS; texts: sources and headers by name
    def __init__(self, addresses: Sequence[int], texts: Mapping[str, str], /) -> None: ...
    @property
    def version(self) -> str: ...
    def key_of(self, source: str, macros: Mapping[str, str], arch: str, /) -> str: ...
    def compile(self, source: str, macros: Mapping[str, str], arch: str, /) -> bytes: ...

class CubinCache:
    """Compiled kernels in the folder that the environment names."""

    # warn: called with a message about a folder that is not trusted
    def __init__(self, variable: str, name: str, warn: Callable[[str], None], /) -> None: ...
    @property
    def folder(self) -> str: ...
    def load(self, key: str, /) -> bytes: ...
    def store(self, key: str, code: bytes, /) -> str: ...  # why it was not written, or ""

class Fields:
    """Fields of arguments that point into one block of memory."""

    def __init__(self) -> None: ...
    def add(self, field: int, offset: int, /) -> None: ...
    def move(self, base: int, /) -> None: ...

class Driver:
    """The CUDA driver of this machine, or functions in its place: their addresses by name."""

    def __init__(self, functions: Mapping[str, int] = ..., /) -> None: ...

class Device:
    """A GPU and the kernels loaded on it."""

    # compile: (source, macros, architecture) -> machine code
    # start: starts a thread that calls its argument, if it can
    # graphs: whether launches that repeat become graphs
    def __init__(
        self,
        driver: Driver,
        index: int,
        compile: Callable[[str, dict[str, str], str], bytes],
        start: Callable[[Callable[[], None]], None],
        graphs: bool,
        /,
    ) -> None: ...
    @property
    def arch(self) -> str: ...
    @property
    def has_clusters(self) -> bool: ...
    def clusters(self) -> dict[int, int]: ...
    def expect(self, source: str, macros: Mapping[str, str], /) -> None: ...
    # the driver's handle
    def load(self, source: str, function: str, macros: Mapping[str, str], grid: Grid, /) -> int: ...
    # starts a kernel that takes the struct at the address `argument`; returns the driver's status
    def launch(self, function: int, grid: Grid, argument: int, stream: int, /) -> int: ...
    def check(self, status: int, /) -> None: ...  # raises an error, unless the status is 0

class Launches:
    """A list of launches that start in order."""

    def __init__(self, device: Device) -> None: ...
    def add(self, function: int, grid: Grid, argument: int, /) -> None: ...
    # the addresses of cublasLtMatmul and of a `cublaslt.ProductC`
    def add_product(self, function: int, product: int, /) -> None: ...
    # key: all that the arguments depend on; launches that repeat become a graph
    def start(self, stream: int, key: Sequence[int] = ..., /) -> int: ...

class TensorLaunch:
    """A launch whose arguments are tensors and numbers that differ between calls."""

    def __init__(
        self,
        launches: Launches,
        fields: Sequence[int],
        tensor: type,
        device: int,
        stream: Callable[[], int],
        fail: Callable[[int], None],
        keep: Any,
        /,
    ) -> None: ...
    def __call__(self, *values: Any) -> None: ...
