"""Compiles CUDA C++ to machine code with NVRTC, without a toolkit, CUDA headers or a GPU."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Mapping
from functools import cache

import torch

from quant_gru.kernel_runtime import _native
from quant_gru.kernel_runtime.cuda.sources import RUNTIME, Sources
from quant_gru.kernel_runtime.errors import KernelError, raised_as

_logger = logging.getLogger(__name__)


def missing() -> str | None:
    """Return what must be installed to compile kernels here; None if nothing is missing."""
    try:
        version()
    except KernelError as error:
        return str(error)
    return None


def version() -> str:
    """Return the version of NVRTC, such as '13.0'."""
    return native(RUNTIME).version


def machine_code(sources: Sources, name: str, macros: Mapping[str, object], arch: str) -> bytes:
    """Return the cubin of a source, from the disk cache if it is there.

    Args:
        sources: The sources of the package.
        name: Name of a .cu file, such as 'backward/recurrence'.
        macros: Macros that specialize the source.
        arch: The architecture, such as 'sm_90a'.

    Raises:
        Exception: `sources.error`, if NVRTC is missing or cannot compile the source.
    """
    with raised_as(sources.error):
        given = name, {macro: str(value) for macro, value in macros.items()}, arch
        compiler = native(sources)
        key = compiler.key_of(*given)
        code = sources.cache.load(key)
        if code is None:
            begin = time.monotonic()
            code = compiler.compile(*given)
            seconds = time.monotonic() - begin
            _logger.info(
                "compiled %s.cu for %s in %.1f s: %d bytes", name, arch, seconds, len(code)
            )
            sources.cache.store(key, code)
        else:
            _logger.debug("%s.cu for %s: cached as %s", name, arch, key)
        return code


@cache
def native(sources: Sources) -> _native.Compiler:
    """Return the compiler of a package's sources.

    Raises:
        KernelError: NVRTC is missing.
    """
    return _native.Compiler(_nvrtc(), sources.texts)


@cache
def _nvrtc() -> list[int]:
    """Return the addresses of NVRTC's functions, from a package, a toolkit or the system."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("nvrtc").abs_path)
        functions = [getattr(library, name) for name in _native.NVRTC_FUNCTIONS]
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        raise missing_package(error) from error
    return [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions]


def missing_package(error: Exception) -> KernelError:
    """Return the error that says what to install: the search for NVRTC, or NVRTC."""
    # Suggest the major version of PyTorch's CUDA, which the installed GPU driver supports.
    major = (torch.version.cuda or "13").partition(".")[0]
    if isinstance(error, ImportError):
        name = package = "cuda-pathfinder"
    else:
        name, package = "NVRTC", f"nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}=={major}.*"
    first = str(error).partition("\n")[0]
    return KernelError(
        f'Expected {name} to be installed (pip install "{package}"), '
        f"got {type(error).__name__}: {first}"
    )
