"""Compiles kernels before they are loaded: those of a call take as long as the longest of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kernel_runtime.cuda import compiler
from kernel_runtime.cuda.launch import Kernel
from kernel_runtime.cuda.sources import Sources

_Key = tuple[str, tuple[tuple[str, object], ...]]


class ParallelCompiler:
    """Machine code that is on its way, each in a thread of its own: NVRTC waits for no other.

    Args:
        arch: What is compiled for, such as 'sm_90a'.
        sources: Where the sources lie.
    """

    def __init__(self, arch: str, sources: Sources) -> None:
        self._arch, self._sources = arch, sources
        self._lock = threading.Lock()
        self._coming: dict[_Key, Future[bytes]] = {}

    def expect(self, kernel: Kernel) -> None:
        """Begin with a kernel, unless it has been begun; errors are for `take`."""
        self._begin((kernel.source, kernel.macros))

    def take(self, kernel: Kernel) -> bytes:
        """The machine code, once it is there.

        Raises:
            Exception: As `compiler.machine_code`; the next call tries again.
        """
        key = (kernel.source, kernel.macros)
        coming = self._begin(key)
        if coming is None:
            return self._machine_code(key)
        try:
            return coming.result()
        finally:
            with self._lock:
                self._coming.pop(key, None)

    def _begin(self, key: _Key) -> Future[bytes] | None:
        """What will be there; None where no thread can be started for it."""
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                coming = Future()
                # waited for at exit, whoever began: NVRTC does not outlive what the process unloads
                thread = threading.Thread(target=self._compile, args=(key, coming), daemon=False)
                try:
                    thread.start()
                except RuntimeError:
                    return None
                self._coming[key] = coming
        return coming

    def _compile(self, key: _Key, coming: Future[bytes]) -> None:
        try:
            coming.set_result(self._machine_code(key))
        except BaseException as error:
            coming.set_exception(error)

    def _machine_code(self, key: _Key) -> bytes:
        source, macros = key
        return compiler.machine_code(self._sources, source, dict(macros), self._arch)
