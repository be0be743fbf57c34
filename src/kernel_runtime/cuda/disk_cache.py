"""Compiled kernels on disk: one file each, verified by a digest of its name and content."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_runtime.errors import KernelError

_SUFFIX = ".cubin"
_DIGEST_BYTES = 32


def key(parts: Sequence[str]) -> str:
    """Return the name of an entry: a digest of everything that determines the compiled code.

    Args:
        parts: Sources, options, compiler version and architecture.
    """
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


@dataclass(frozen=True)
class DiskCache:
    """The compiled kernels of a package.

    Attributes:
        variable: Environment variable with the path of the folder.
        name: Name of the folder in the user's cache, used if the variable is not set.
    """

    variable: str
    name: str

    def folder(self) -> Path:
        """Return the folder of compiled kernels.

        Raises:
            KernelError: No variable is set and the user has no home folder.
        """
        chosen = os.environ.get(self.variable)
        if chosen:
            return Path(chosen)
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            return (Path(base) if base else Path.home() / ".cache") / self.name
        except RuntimeError as error:
            raise KernelError(
                f"Expected {self.variable}, XDG_CACHE_HOME or HOME to be set, "
                f"got none of them and {error}"
            ) from None

    def load(self, name: str) -> bytes | None:
        """Return the compiled kernel of a key; None if it is missing or damaged."""
        try:
            data = (self.folder() / (name + _SUFFIX)).read_bytes()
        except (OSError, KernelError):
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return content if content and _digest(name, content) == digest else None

    def store(self, name: str, content: bytes) -> None:
        """Write a compiled kernel. Does nothing if the folder cannot be written."""
        try:
            folder = self.folder()
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        except (OSError, KernelError):
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(name, content) + content)
            # The replacement is atomic, also if several processes write the same entry.
            os.replace(temporary, folder / (name + _SUFFIX))
        except OSError:
            Path(temporary).unlink(missing_ok=True)

    def entries(self) -> Iterator[Path]:
        """Yield the files of the cache, including those of interrupted writes.

        Raises:
            KernelError: The folder cannot be read.
        """
        found = self.folder()
        with self._named_errors():
            inside = sorted(found.iterdir()) if found.is_dir() else []
        yield from (path for path in inside if path.suffix in (_SUFFIX, ".tmp"))

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


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()
