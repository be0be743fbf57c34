"""The CUDA sources of a package, its cache of compiled kernels, and its error class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quant_gru.kernel_runtime.cuda.disk_cache import DiskCache
from quant_gru.kernel_runtime.errors import KernelError

_RUNTIME = Path(__file__).parent
_CACHE = DiskCache("KERNEL_RUNTIME_CACHE", "kernel-runtime")


# Every call looks up its device by this object; eq=False avoids hashing all headers each time.
@dataclass(frozen=True, eq=False)
class Sources:
    """The CUDA sources of a package, in addition to those of the runtime.

    Attributes:
        folder: Folder of its .cu files; those of the runtime are found, too.
        headers: Pairs of the name in an #include and the path of each header.
        error: The exception class for sources that cannot be compiled or run.
        cache: Cache of the compiled kernels.
        records_graphs: Whether launches that repeat become CUDA graphs.
    """

    folder: Path
    headers: tuple[tuple[str, Path], ...] = ()
    error: type[Exception] = KernelError
    cache: DiskCache = _CACHE
    records_graphs: bool = True

    @property
    def texts(self) -> Mapping[str, str]:
        """Name in an #include -> text of the header; 'NAME.cu' -> text of the source."""
        root = _RUNTIME.parent
        headers = (*_RUNTIME.glob("*.cuh"), *root.glob("c99/*.h"))
        of_runtime = {path.relative_to(root.parent).as_posix(): path for path in headers}
        places = {**dict(self.headers), **of_runtime, "stdint.h": _RUNTIME / "stdint.h"}
        for folder in (self.folder, _RUNTIME):
            places |= {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.cu")}
        return {name: path.read_text("utf-8") for name, path in places.items()}


RUNTIME = Sources(_RUNTIME)
"""Only the sources of the runtime."""
