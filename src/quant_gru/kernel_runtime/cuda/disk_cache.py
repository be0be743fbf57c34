"""Compiled kernels on disk. `native/cubin_cache.hpp` says what is read and written."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.errors import KernelError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskCache:
    """The compiled kernels of a package.

    Attributes:
        variable: Environment variable with the path of the folder.
        name: Name of the folder in the user's cache, used if the variable is not set.
        warning: The class of the warning about a folder that is not used.
    """

    variable: str
    name: str
    warning: type[Warning] = RuntimeWarning

    @property
    def _native(self) -> _native.CubinCache:
        return _native.CubinCache(self.variable, self.name, self._warn)

    def folder(self) -> Path:
        """Return the folder of compiled kernels.

        Raises:
            KernelError: No variable is set and the user has no home folder.
        """
        found = self._native.folder
        if not found:
            other = "LOCALAPPDATA" if sys.platform == "win32" else "HOME"
            raise KernelError(f"Expected {self.variable} or {other} to be set, got neither")
        return Path(found)

    def load(self, name: str) -> bytes | None:
        """Return the compiled kernel of a key; None if it is missing or damaged."""
        return self._native.load(name) or None

    def store(self, name: str, content: bytes) -> None:
        """Write a compiled kernel. Does nothing if the folder cannot be written or trusted."""
        cache = self._native
        if reason := cache.store(name, content):
            _logger.info("compiled kernels are not cached: %s", reason)
        else:
            _logger.debug("cached %s in '%s'", name, cache.folder)

    def _warn(self, message: str) -> None:
        warnings.warn(message, self.warning, stacklevel=2)

    def entries(self) -> Iterator[Path]:
        """Yield the files of the cache, including those of interrupted writes.

        Raises:
            KernelError: The folder cannot be read.
        """
        found = self.folder()
        with self._named_errors():
            inside = sorted(found.iterdir()) if found.is_dir() else []
        yield from (path for path in inside if path.suffix in (".cubin", ".tmp"))

    def sizes(self) -> list[int]:
        """Return the size of each entry in bytes; entries that vanish meanwhile are skipped.

        Raises:
            KernelError: An entry cannot be read.
        """
        found = []
        with self._named_errors():
            for path in self.entries():
                with suppress(FileNotFoundError):
                    found.append(path.stat().st_size)
        return found

    def clear(self) -> int:
        """Remove all entries and return their number.

        Raises:
            KernelError: A file cannot be removed.
        """
        count = 0
        with self._named_errors():
            for path in self.entries():
                path.unlink(missing_ok=True)
                count += 1
        return count

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert an OSError to a KernelError that names the file."""
        try:
            yield
        except OSError as error:
            where, reason = error.filename or self.folder(), error.strerror or error
            raise KernelError(
                f"Expected the files of the cache to be ours, got '{where}': {reason}"
            ) from None
