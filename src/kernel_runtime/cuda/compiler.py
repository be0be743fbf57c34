"""CUDA C++ to machine code, by NVRTC: no toolkit, no headers, no GPU needed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kernel_runtime.cuda import disk_cache
from quant_gru._errors import QuantGRUError

_RUNTIME = Path(__file__).parents[1]
_KERNELS = _RUNTIME.parent / "quant_gru" / "kernels"
_SOURCES = _KERNELS / "cuda"
# all that the headers in C take from it
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
# sums and products are rounded as written
_OPTIONS = ("--device-as-default-execution-space", "--std=c++17", "--fmad=false")
# without textures and the runtime library, which are read before every source
_MINIMAL, _MINIMAL_SINCE = "--minimal", (12, 4)


def available() -> bool:
    """Whether kernels can be compiled here."""
    return missing() is None


def missing() -> str | None:
    """What has to be installed before kernels can be compiled here; None where nothing has."""
    try:
        version()
    except QuantGRUError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's version, e.g. '13.0'."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the library is looked for at the first call
        raise _missing(error) from error
    _check(status)
    return f"{major}.{minor}"


def machine_code(name: str, macros: Mapping[str, object], arch: str) -> bytes:
    """A cubin of one of our sources, from the disk cache where it is there.

    Args:
        name: Of a .cu file beside this one or below: 'recurrent', 'backward/slopes'.
        macros: What the source is specialized on.
        arch: 'sm_90a' and the like.

    Raises:
        QuantGRUError: NVRTC is missing or refuses.
    """
    headers = _headers()
    source = _source_of(name).read_text(encoding="utf-8")
    options = (
        *_options(),
        f"--gpu-architecture={arch}",
        *(f"-D{macro}={value}" for macro, value in sorted(macros.items())),
    )
    key = disk_cache.key((source, *headers, *headers.values(), *options, version()))
    code = disk_cache.load(key)
    if code is None:
        code = compile_source(name, source, options)
        disk_cache.store(key, code)
    return code


def compile_source(name: str, source: str, options: tuple[str, ...]) -> bytes:
    """Compile without looking into the cache; errors carry NVRTC's log."""
    nvrtc, headers = _nvrtc(), _headers()
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
            raise QuantGRUError(
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


@lru_cache(maxsize=1)
def _headers() -> dict[str, str]:
    places = {
        **{path.relative_to(_SOURCES): path for path in _SOURCES.rglob("*.cuh")},
        **{path.relative_to(_KERNELS): path for path in (_KERNELS / "c99").glob("*.h")},
        **{path.relative_to(_RUNTIME.parent): path for path in _RUNTIME.rglob("*.cuh")},
    }
    found = {name.as_posix(): path.read_text("utf-8") for name, path in sorted(places.items())}
    return {"stdint.h": _STDINT, **found}


def _source_of(name: str) -> Path:
    of_ours = _RUNTIME / "cuda" / f"{name}.cu"
    return of_ours if of_ours.exists() else _SOURCES / f"{name}.cu"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise _missing(error) from error
    return nvrtc


def _missing(error: Exception) -> QuantGRUError:
    # of the major version of PyTorch's CUDA, which the installed GPU driver runs
    major = (torch.version.cuda or "13").partition(".")[0]
    if isinstance(error, ImportError):
        name, package = "cuda-bindings", "cuda-bindings"
    else:
        name, package = "NVRTC", f"nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}"
    first = str(error).partition("\n")[0]
    return QuantGRUError(
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
        raise QuantGRUError(f"Expected NVRTC to succeed, got {status!s}")
