"""Compiles CUDA C++ to machine code with NVRTC, without a toolkit, CUDA headers or a GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from quant_gru.kernel_runtime.cuda import disk_cache
from quant_gru.kernel_runtime.cuda.sources import Sources
from quant_gru.kernel_runtime.errors import KernelError, raised_as

# --fmad=false: products and sums are rounded separately, as written.
_OPTIONS = ("--device-as-default-execution-space", "--std=c++17", "--fmad=false")
# Omits declarations of textures and of the runtime library, which precede every source.
_MINIMAL, _MINIMAL_SINCE = "--minimal", (12, 4)

_logger = logging.getLogger(__name__)


def available() -> bool:
    """Whether kernels can be compiled here."""
    return missing() is None


def missing() -> str | None:
    """Return what must be installed to compile kernels here; None if nothing is missing."""
    try:
        version()
    except KernelError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def version() -> str:
    """Return the version of NVRTC, such as '13.0'."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings loads the library at the first call
        raise _missing(error) from error
    _check(status)
    return f"{major}.{minor}"


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
        headers = sources.header_texts
        source = sources.path_of(name).read_text(encoding="utf-8")
        options = (
            *_options(),
            f"--gpu-architecture={arch}",
            *(f"-D{macro}={value}" for macro, value in sorted(macros.items())),
        )
        key = disk_cache.key((source, *headers, *headers.values(), *options, version()))
        code = sources.cache.load(key)
        if code is None:
            begin = time.monotonic()
            code = compile_source(sources, name, source, options)
            seconds = time.monotonic() - begin
            _logger.info(
                "compiled %s.cu for %s in %.1f s: %d bytes", name, arch, seconds, len(code)
            )
            sources.cache.store(key, code)
        else:
            _logger.debug("%s.cu for %s: cached as %s", name, arch, key)
        return code


def compile_source(sources: Sources, name: str, source: str, options: tuple[str, ...]) -> bytes:
    """Compile without using the cache. The message of a KernelError contains NVRTC's log."""
    nvrtc, headers = _nvrtc(), sources.header_texts
    status, program = nvrtc.nvrtcCreateProgram(
        source.encode(),
        f"{name}.cu".encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [header.encode() for header in headers],
    )
    _check(status)
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(
                f"Expected NVRTC {version()} to compile {name}.cu with {' '.join(options)}, got\n"
                + _log(program)
            )
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        _check(status)
        code = bytes(size)
        _check(nvrtc.nvrtcGetCUBIN(program, code)[0])
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _options() -> tuple[str, ...]:
    known = tuple(map(int, version().split("."))) >= _MINIMAL_SINCE
    return (*_OPTIONS, _MINIMAL) if known else _OPTIONS


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing(error) from error
    return nvrtc


def _missing(error: Exception) -> KernelError:
    # Suggest the major version of PyTorch's CUDA, which the installed GPU driver supports.
    major = (torch.version.cuda or "13").partition(".")[0]
    if isinstance(error, ImportError):
        name, package = "cuda-bindings", "cuda-bindings"
    else:
        name, package = "NVRTC", f"nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}"
    first = str(error).partition("\n")[0]
    return KernelError(
        f'Expected {name} to be installed (pip install "{package}=={major}.*"), '
        f"got {type(error).__name__}: {first}"
    )


def _log(program: Any) -> str:
    nvrtc = _nvrtc()
    status, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(status)
    text = bytes(size)
    _check(nvrtc.nvrtcGetProgramLog(program, text)[0])
    return text.rstrip(b"\0 \n").decode(errors="replace")


def _check(status: Any) -> None:
    if int(status) != 0:
        raise KernelError(f"Expected NVRTC to succeed, got {status!s}")
