"""Compiles the kernels of a call in parallel, before they are loaded."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from quant_gru.kernel_runtime.cuda import compiler
from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernel_runtime.cuda.sources import Sources

_Key = tuple[str, tuple[tuple[str, object], ...]]


class ParallelCompiler:
    """Compiles each kernel in its own thread; NVRTC compilations run concurrently.

    Args:
        arch: The architecture, such as 'sm_90a'.
        sources: The sources of the package.
    """

    def __init__(self, arch: str, sources: Sources) -> None:
        self._arch, self._sources = arch, sources
        self._lock = threading.Lock()
        self._coming: dict[_Key, Future[bytes]] = {}

    def expect(self, kernel: Kernel) -> None:
        """Start compiling a kernel, unless it has been started; `take` raises the errors."""
        self._begin((kernel.source, kernel.macros))

    def take(self, kernel: Kernel) -> bytes:
        """Wait for the machine code and return it.

        Raises:
            Exception: The errors of `compiler.machine_code`; the next call tries again.
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
        """Return the future of the machine code; None if no thread can be started."""
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                coming = Future()
                # Never a daemon, even if a daemon starts it: the process waits for it at exit,
                # because NVRTC does not survive the unloading of libraries.
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
