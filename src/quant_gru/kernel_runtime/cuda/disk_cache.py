"""Compiled kernels on disk: one file each, verified by a digest of its name and content.

The digest has no secret. Whoever can write the folder decides what runs on the GPU, so a folder
that other users can write is not used. `native/cubin_cache.cpp` has the same rules.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quant_gru.kernel_runtime.errors import KernelError

_SUFFIX = ".cubin"
_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 28

_logger = logging.getLogger(__name__)
_distrusted: set[Path] = set()


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
        warning: The class of the warning about a folder that is not used.
    """

    variable: str
    name: str
    warning: type[Warning] = RuntimeWarning

    def folder(self) -> Path:
        """Return the folder of compiled kernels.

        Raises:
            KernelError: No variable is set and the user has no home folder.
        """
        chosen = os.environ.get(self.variable)
        if chosen:
            return Path(chosen)
        # the folders of platformdirs; C++ has the same rules and shares them
        windows = sys.platform == "win32"
        base = os.environ.get("XDG_CACHE_HOME", "")
        try:
            if windows:
                return Path(os.environ["LOCALAPPDATA"], self.name, "Cache")
            if os.path.isabs(base):  # a relative path is to be ignored
                return Path(base, self.name)
            folder = "Library/Caches" if sys.platform == "darwin" else ".cache"
            return Path.home() / folder / self.name
        except (KeyError, RuntimeError) as error:
            raise KernelError(
                f"Expected {self.variable} or {'LOCALAPPDATA' if windows else 'HOME'} to be set, "
                f"got neither and {error!r}"
            ) from None

    def load(self, name: str) -> bytes | None:
        """Return the compiled kernel of a key; None if it is missing or damaged."""
        try:
            folder = self.folder()
            if not self._is_trusted(folder):
                return None
            # without waiting for a writer, if the entry is a pipe
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
            with os.fdopen(os.open(folder / (name + _SUFFIX), flags), "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                    return None
                data = b"" if _others_write(found) else file.read()
        except (OSError, KernelError):
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return content if content and _digest(name, content) == digest else None

    def store(self, name: str, content: bytes) -> None:
        """Write a compiled kernel. Does nothing if the folder cannot be written or trusted."""
        try:
            folder = self.folder()
            folder.mkdir(0o775, parents=True, exist_ok=True)
            if not self._is_trusted(folder):
                return
            temporary = folder / f"{uuid.uuid4().hex}.tmp"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            # the umask decides who can read and write it, except for what would not be trusted
            handle = os.open(temporary, flags, 0o664)
        except (OSError, KernelError) as error:
            _logger.info("compiled kernels are not cached: %s", error)
            return
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(name, content) + content)
            # The replacement is atomic, also if several processes write the same entry.
            os.replace(temporary, folder / (name + _SUFFIX))
            _logger.debug("cached %s in '%s'", name, folder)
        except OSError as error:
            _logger.info("'%s' takes no compiled kernels: %s", folder, error)
            temporary.unlink(missing_ok=True)

    def _is_trusted(self, folder: Path) -> bool:
        """Return whether a folder belongs to this user or root, and others cannot write it."""
        try:
            found = folder.stat()
        except OSError:
            return True  # there is nothing in it
        if os.name == "nt" or not stat.S_ISDIR(found.st_mode):
            return True
        if not _others_write(found) and found.st_uid in (0, os.geteuid()):
            return True
        if folder not in _distrusted:
            _distrusted.add(folder)
            others = _others_write(found)
            why = "others can write it" if others else "it belongs to another user"
            cure = f", or run chmod o-w '{folder}'" if others else f" in place of '{folder}'"
            warnings.warn(
                f"the cache of compiled kernels is not used, because {why}: kernels are compiled "
                f"again in each process. Use a folder of your own ({self.variable}=..){cure}",
                self.warning,
                stacklevel=2,
            )
        return False

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


def _others_write(found: os.stat_result) -> bool:
    return os.name != "nt" and bool(found.st_mode & stat.S_IWOTH)
