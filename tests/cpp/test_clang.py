"""Clang compiles the sources of the library: that of Debian 12, a new one, and for other systems.

The compiler for other systems is Zig's: pip install ziglang.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpp_build import ROOT, run

KERNELS = ROOT / "src/quant_gru/kernels"
FOLDERS = (ROOT / "cpp/include", ROOT / "cpp/src", ROOT / "src", ROOT / "src/quant_gru", KERNELS)
INCLUDES = [f"-I{path}" for path in FOLDERS]
RUNTIME = ROOT / "src/quant_gru/kernel_runtime/native"
GPU = ("compiler", "cubin_cache", "device", "driver", "embedded", "sha256", "shared_library")
GPU += ("whole_files",)
PORTABLE = KERNELS / "cpu/isa/portable.cpp"
SOURCES = [
    *sorted(ROOT.glob("cpp/src/**/*.cpp")),
    *(path for part in ("core", "training") for path in sorted(KERNELS.glob(f"cpu/{part}/*.cpp"))),
    *sorted(KERNELS.glob("cuda/host/**/*.cpp")),
    *(RUNTIME / f"{name}.cpp" for name in GPU),
    PORTABLE,
]
# Half of the time goes into these. That each file includes what it needs, the other builds show.
STANDARD = ("algorithm", "array", "cmath", "cstdint", "cstring", "functional", "map", "memory")
STANDARD += ("mutex", "optional", "stdexcept", "string", "thread", "utility", "vector")
# flags of each instruction set; test_sources_compile has the portable one
AVX2 = ["-DQG_X86", "-mavx2", "-mfma"]
AVX512 = [*AVX2, *(f"-mavx512{each}" for each in ("f", "bw", "dq", "vl", "vnni", "vbmi"))]
SETS = {"avx2": AVX2, "avx512_vbmi": ["-DQG_LIKE=avx512_vnni", *AVX512]}
CLANG = ("clang++-14", "clang++-22")
# What differs between systems and processors, which all compile. Of the others each is for one: the
# oldest compiler, or Windows, with the standard library of macOS and integers of other sizes.
SYSTEM = re.compile(r"_WIN32|__APPLE__|__linux__|<(?:dlfcn|sys/\w+|unistd)\.h>|QG_(?:X86|NEON)")
OTHERS = {CLANG[0]: 0, "windows": 1}
# Each system and each processor once. Code that is not run needs no sanitizers.
ZIG = [sys.executable, "-m", "ziglang", "c++", "-O0", "-fno-sanitize=all", "-target"]
SYSTEMS = {
    "windows": [*ZIG, "x86_64-windows-gnu", "-DQG_X86"],
    "macos": [*ZIG, "aarch64-macos", "-DQG_NEON_DOT"],
    "riscv64": [*ZIG, "riscv64-linux-musl"],  # has the portable kernels only
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not for other processors than x86-64")
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("compiler", CLANG)
def test_kernels_compile(compiler: str, name: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    options = ["-fsyntax-only", "-std=gnu++17", "-DQG_TRAINING", *SETS[name], *INCLUDES]
    run(compiler, *options, KERNELS / f"cpu/isa/{name}.cpp")


@pytest.mark.parametrize("compiler", [*CLANG, *SYSTEMS])
def test_sources_compile(compiler: str, tmp_path: Path) -> None:
    command = [*SYSTEMS.get(compiler, [compiler]), "-std=c++17", "-DQG_TRAINING"]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {compiler}")
    if compiler in SYSTEMS and importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang")
    header, read = tmp_path / "standard.hpp", tmp_path / "standard.pch"
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD))
    run(*command, "-x", "c++-header", header, "-o", read)

    others, sources = [], []
    for each in SOURCES:
        of_all = each == PORTABLE or SYSTEM.search(each.read_text(encoding="utf-8"))
        (sources if of_all else others).append(each)
    assert len(sources) > 5
    assert len(others) > 60
    if compiler in OTHERS:
        sources += others[OTHERS[compiler] :: 2]
    front = front_end([*command, "-include-pch", read, *INCLUDES], sources[0], tmp_path / "unused")
    run(*front, *sources)


def front_end(command: list[str | Path], source: Path, unused: Path) -> list[str]:
    """The command without its source that instantiates templates and generates no code.

    It takes many sources at once, and Zig has no option for it. Zig makes the unused object, too.
    """
    shown = subprocess.run(
        [*command, "-###", "-c", source, "-o", unused], check=True, capture_output=True, text=True
    )
    *options, _ = shlex.split(shown.stderr.splitlines()[-1])
    place = options.index("-o")
    del options[place : place + 2]
    return ["-fsyntax-only" if each == "-emit-obj" else each for each in options]
