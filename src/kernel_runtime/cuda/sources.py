"""Where the CUDA sources of a package lie, where they are kept compiled, and its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernel_runtime.cuda.disk_cache import DiskCache
from kernel_runtime.errors import KernelError

_RUNTIME = Path(__file__).parent
_CACHE = DiskCache("KERNEL_RUNTIME_CACHE", "kernel-runtime")
# all that headers in C take from it
_STDINT = """
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
"""


# calls look up devices by it: its headers are not to be hashed each time
@dataclass(frozen=True, eq=False)
class Sources:
    """The CUDA sources of a package, beside those of the runtime.

    Attributes:
        folder: Where its .cu files lie; those of the runtime are found, too.
        headers: The name in an #include of each of its headers -> where it lies.
        error: What is raised where they cannot be compiled or run.
        cache: Where they are kept compiled.
    """

    folder: Path
    headers: tuple[tuple[str, Path], ...] = ()
    error: type[Exception] = KernelError
    cache: DiskCache = _CACHE

    def path_of(self, name: str) -> Path:
        """The file of a source, such as 'backward/recurrence'."""
        of_runtime = _RUNTIME / f"{name}.cu"
        return of_runtime if of_runtime.exists() else self.folder / f"{name}.cu"

    @cached_property
    def header_texts(self) -> Mapping[str, str]:
        """Name in an #include -> the text of the header."""
        of_runtime = {f"kernel_runtime/cuda/{path.name}": path for path in _RUNTIME.glob("*.cuh")}
        places = sorted({**dict(self.headers), **of_runtime}.items())
        return {"stdint.h": _STDINT, **{name: path.read_text("utf-8") for name, path in places}}


RUNTIME = Sources(_RUNTIME)
"""The sources of the runtime alone."""
